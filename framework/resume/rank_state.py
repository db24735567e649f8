"""Per-rank state of a checkpoint: random generators, the epoch's metrics so far, the position in the data.

With the same number of ranks each rank restores its own state. With another number the metric states of all ranks are
distributed over the new ranks such that their sums stay the same; generators are seeded from the position of the run.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..checkpoint.codec import decode, encode_inline
from ..checkpoint.manifest import JSON
from ..checkpoint.reader import Checkpoint
from ..core.errors import ConfigurationError
from ..core.position_rng import mix_seed
from ..data.accumulation_window import Windows
from ..distributed.seed import Generators, capture, restore, seed_rank
from ..run.run import Run


def capture_rank(run: Run, windows: Windows | None) -> Any:
    """Return the state of this rank as JSON values."""
    return RankState(run, windows).document()


class RankState:
    """The state of this rank at one moment."""

    def __init__(self, run: Run, windows: Windows | None) -> None:
        self._redone_from, self._group = run.redone_from, run.world.identical_group
        if self._redone_from is None:
            # The values that were logged stay on their devices: this may run after each step.
            self._generators, self._log = Generators(), run.train_log.record()
            self._evaluated = dict(run.evaluated_batches)
        # Encoded now, since the loader may change its state in place.
        self._data = None if windows is None else _data(windows)

    def document(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        state = self._redone_from or {
            "random": self._generators.state(),
            "log": self._log.state_dict(),
            "evaluated": self._evaluated,
        }
        document: dict[str, Any] = {**encode_inline(state), "group": self._group}
        return document if self._data is None else {**document, "data": self._data}


def _data(windows: Windows) -> JSON:
    if (data := windows.source_state()) is None:
        return None
    try:
        return encode_inline(data)
    except ConfigurationError as error:
        windows.source.announce(
            f"The state of {windows.source.name} is not saved, so a resumed run reads it from the start: {error}"
        )
        windows.source.stop_keeping_state()
        return None


@contextmanager
def redone(run: Run) -> Generator[dict[str, Any], None, None]:
    """Mark a section that a run resumed from a checkpoint saved within it repeats; yield the state at its start.

    Such a checkpoint holds the generators and metrics of the start of the section. With those of the moment of the save
    the repetition would draw other random numbers and count values twice.
    """
    state = _state(run)
    run.replay_from(state)
    try:
        yield state
    finally:
        run.replay_from(None)


def _state(run: Run) -> dict[str, Any]:
    return {"random": capture(), "log": run.train_log.record().state_dict(), "evaluated": dict(run.evaluated_batches)}


def rejoin(run: Run) -> None:
    """Set the generators to the saved position at the point where a resumed run continues.

    Code that has run since ``restore_rank``, such as hooks, was repeated and may have drawn random numbers.
    """
    if run.redone_from is not None:
        restore(run.redone_from["random"])
        run.replay_from(None)


def restore_rank(run: Run, checkpoint: Checkpoint, windows: Windows) -> None:
    """Restore the metrics that ranks had accumulated, and pass the data's states to the source.

    Code that runs until ``rejoin`` is repeated. Generators are then those of the checkpoint, or seeded again if the
    data is distributed over another number of ranks.
    """
    # A checkpoint converted from another library has no rank states.
    documents = [document for document in checkpoint.rank_documents if document is not None]
    world = run.world
    parts = checkpoint.document.get("data_ranks", len(documents))
    # Ranks that compute the same (those of a tensor-parallel group) have equal states: use the first one of each group.
    # Ranks that read the same data, and compute parts of it, have states of their own.
    copies = max(1, len(documents) // (parts or 1))
    kept: list[dict[str, Any]] = documents[::copies]
    counted = _first_of_groups(documents, checkpoint.document.get("identical_ranks", copies))
    own, size = world.identical_group, world.size // world.identical
    same = parts == world.data_size and len(counted) == size and bool(kept)
    mine: list[dict[str, Any]] = [decode(document) for document in counted[own::size]]
    if mine:
        run.train_log.load_state_dicts([state["log"] for state in mine])
        run.evaluated_batches.update(mine[0].get("evaluated", {}))
    if same:
        windows.source.restore([mine[0].get("data")], own=True)
    else:
        windows.source.restore([decode(document.get("data")) for document in kept], own=False)
        seed_rank(mix_seed(run.seed, run.progress.attempts, own), world.device)
    random = mine[0]["random"] if same else capture()
    run.replay_from({**_state(run), "random": random})


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
