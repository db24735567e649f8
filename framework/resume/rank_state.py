"""What a checkpoint keeps of each rank by itself: random generators, the epoch's figures so far, its place in the data.

On as many ranks as before each takes up its own. On another number the figures of all are shared out over the new ones,
where their sums stay what they were; generators follow from where the run stands.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..checkpoint.codec import decode, encode_inline
from ..core.errors import ConfigurationError
from ..core.position_rng import mix_seed, seed_generators
from ..distributed.seed import capture, restore

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint
    from ..data.accumulation_window import Windows
    from ..run.run import Run


def capture_rank(run: Run, windows: Windows | None) -> Any:
    """Return this rank's own state as JSON values."""
    document: dict[str, Any] = encode_inline(run.redone_from or _state(run))
    if windows is not None and (data := windows.source_state()) is not None:
        try:
            document["data"] = encode_inline(data)
        except ConfigurationError as error:
            windows.source.announce(
                f"The state of {windows.source.name} is not saved, so a resumed run reads it from the start: {error}"
            )
            windows.source.keeps_state = False
    return document


@contextmanager
def redone(run: Run) -> Generator[None, None, None]:
    """Do what a run that resumes from a checkpoint saved in between does anew: generators and figures are then those
    of the beginning."""
    run.replay_from(_state(run))
    try:
        yield
    finally:
        run.replay_from(None)


def _state(run: Run) -> dict[str, Any]:
    return {"random": capture(), "log": run.train_log.state_dict(), "evaluated": dict(run.evaluated_batches)}


def rejoin(run: Run) -> None:
    """Put generators back to where a resumed run goes on: what came before was done anew."""
    if run.redone_from is not None:
        restore(run.redone_from["random"])
        run.replay_from(None)


def restore_rank(run: Run, checkpoint: Checkpoint, windows: Windows) -> None:
    """Take up what ranks had gathered, and hand the data's states to the source.

    What the run does until ``rejoin`` is done anew. Generators are then as they were saved, or seeded anew where the
    data was shared out over another number of ranks.
    """
    # One that was converted from another library's has none.
    documents = [document for document in checkpoint.rank_documents if document is not None]
    world = run.world
    parts = checkpoint.document.get("data_ranks", len(documents))
    # Of ranks that see the same data, the first one's.
    kept: list[dict[str, Any]] = documents[:: max(1, len(documents) // (parts or 1))]
    same = parts == world.data_size and bool(kept)
    mine: list[dict[str, Any]] = [decode(document) for document in kept[world.data_rank :: world.data_size]]
    if mine:
        run.train_log.load_state_dicts([state["log"] for state in mine])
        run.evaluated_batches.update(mine[0].get("evaluated", {}))
    if same:
        windows.source.restore([mine[0].get("data")], own=True)
    else:
        windows.source.restore([decode(document.get("data")) for document in kept], own=False)
        seed_generators(mix_seed(run.seed, run.progress.attempts, world.data_rank))
    random = mine[0]["random"] if same else capture()
    run.replay_from({**_state(run), "random": random})
