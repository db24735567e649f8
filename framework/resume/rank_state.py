"""Per-rank state of a checkpoint: random generators, the epoch's metrics so far, the state of a stateful loader.

The position in the data is the same on all ranks, and is part of the common document: see ``place_of`` in
``capture.py``.

With the same number of ranks each rank restores its own state. With another number the metric states of all ranks are
distributed over the new ranks such that their sums stay the same; generators are seeded from the position of the run.
"""

from __future__ import annotations

from typing import Any

from ..checkpoint.codec import decode, encode_inline
from ..checkpoint.manifest import JSON
from ..checkpoint.reader import Checkpoint
from ..core.errors import ConfigurationError
from ..core.position_rng import mix_seed
from ..data.accumulation_window import Windows
from ..distributed.seed import Generators, seed_rank
from ..run.run import Run


def capture_rank(run: Run, windows: Windows | None) -> Any:
    """Return the state of this rank as JSON values."""
    return RankState(run, windows).document()


class RankState:
    """The state of this rank at one moment."""

    def __init__(self, run: Run, windows: Windows | None) -> None:
        self._repeated_from, self._group = run.repeated.state, run.world.identical_group
        if self._repeated_from is None:
            # The values that were logged stay on their devices: this may run after each step.
            self._generators, self._log = Generators(), run.train_log.record()
            self._evaluated = dict(run.evaluated_batches)
        # Encoded now, since the loader may change its state in place.
        self._loader_state = None if windows is None else _loader_state(windows)

    def document(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        state = self._repeated_from or {
            "random": self._generators.state(),
            "log": self._log.state_dict(),
            "evaluated": self._evaluated,
        }
        document: dict[str, Any] = {**encode_inline(state), "group": self._group}
        return document if self._loader_state is None else {**document, "data": self._loader_state}


def _loader_state(windows: Windows) -> JSON:
    if (state := windows.source_state()) is None:
        return None
    try:
        return encode_inline(state)
    except ConfigurationError as error:
        windows.source.announce(
            f"The state of {windows.source.name} is not saved, so a resumed run reads it from the start: {error}"
        )
        windows.source.stop_keeping_state()
        return None


def restore_rank(run: Run, checkpoint: Checkpoint, windows: Windows) -> None:
    """Restore the metrics that ranks had accumulated, and hold the states of loaders and of random generators.

    ``Windows.begin`` opens the loaders with their states. After the hooks that the epoch repeats,
    ``run.repeated.restore_generators`` sets the generators: to those of the checkpoint, or to those seeded here if the
    data is distributed over another number of ranks.
    """
    world = run.world
    # A checkpoint converted from another library has no rank states.
    saved = [document for document in checkpoint.rank_documents if document is not None]
    num_data_ranks = checkpoint.document.get("data_ranks", len(saved))
    # Ranks that read the same batches, such as those of a tensor-parallel group, are neighbours.
    ranks_per_data_rank = max(1, len(saved) // (num_data_ranks or 1))
    # Ranks that read the same batches, and compute parts of them, still have metrics of their own.
    saved_groups = _first_of_groups(saved, checkpoint.document.get("identical_ranks", ranks_per_data_rank))
    group, num_groups = world.identical_group, world.size // world.identical
    inherited: list[dict[str, Any]] = [decode(document) for document in saved_groups[group::num_groups]]
    if inherited:
        run.train_log.load_state_dicts([state["log"] for state in inherited])
        run.evaluated_batches.update(inherited[0].get("evaluated", {}))
    if saved and num_data_ranks == world.data_size and len(saved_groups) == num_groups:
        windows.source.restore([inherited[0].get("data")], own=True)
        run.repeated.hold_generators(inherited[0]["random"])
        return
    loader_states = [decode(document.get("data")) for document in saved[::ranks_per_data_rank]]
    windows.source.restore(loader_states, own=False)
    seed_rank(mix_seed(run.seed, run.progress.steps_reached, group), world.device)
    run.repeated.hold_generators(None)


def _first_of_groups(documents: list[dict[str, Any]], identical: int) -> list[dict[str, Any]]:
    """Return the state of the first rank of each group of ranks that compute the same, in the order of groups.

    Args:
        documents: the states of all ranks.
        identical: the number of ranks next to one another in a group, if the states do not have their group.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank, document in enumerate(documents):
        found.setdefault(document.get("group", rank // identical), document)
    return [found[group] for group in sorted(found)]
