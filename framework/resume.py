"""Where a run resumes from: a path, ``"last"``, ``"best"`` or ``"auto"``. Rank 0 looks, all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from .callback import Callback
from .checkpoint.inspection import kind_of
from .checkpoint.leftovers import clean_own
from .checkpoint.manifest import Manifest
from .checkpoint.newest import newest_good
from .checkpoint.opening import read_manifest
from .errors import CheckpointError, PhalanxError
from .rundir import RunDirectory, next_version, versions
from .world import World

T = TypeVar("T")

WORDS = ("last", "best", "auto")

Refuse = Callable[[Manifest], str | None]
_NO_TRAINING = {
    "weights": "it holds weights alone, so no training can be resumed from it; start from its weights with "
    "load_from_checkpoint.",
    "fabric": "it was saved by Fabric, and says nothing of a Trainer's training; load it with fabric.load.",
    "other": "it was not saved by a Trainer, so no training can be resumed from it.",
}


def not_resumable(manifest: Manifest) -> str | None:
    """Say why no fit can go on from a checkpoint that may be good otherwise, or None where one can."""
    return _NO_TRAINING.get(kind_of(manifest))


@dataclass(frozen=True)
class Origin:
    """Where a fit starts: the version of its directory, and the checkpoint to resume from, if any."""

    version: int
    checkpoint: Path | None
    verified: bool = False
    """Whether rank 0 has read every byte of it, and found it good."""


def check_checkpoint_path(given: str | Path | None) -> None:
    """Refuse a checkpoint path that does not exist. Before any process starts.

    Raises:
        CheckpointError: nothing is there.
    """
    if given is not None and given not in WORDS and not Path(given).exists():
        raise CheckpointError(
            f"ckpt_path={str(given)!r} does not exist; give a checkpoint's directory or one of {WORDS}."
        )


def claim_directory(
    directory: RunDirectory,
    given: str | Path | None,
    callbacks: Sequence[Callback],
    world: World,
    note: Callable[[str], None],
    writes: bool,
) -> Origin:
    """Decide on a run's directory and where it starts from; lock it if the run writes. Collective.

    ``"auto"`` continues the newest version that holds a checkpoint which verifies; all else starts a new version.

    Raises:
        CheckpointError: what was asked for is not there.
        StorageError: the directory cannot be written, or another process writes it.
    """

    def claim() -> Origin:
        found = _find(given, directory.root, directory.name, callbacks, note)
        directory.version = found.version
        if writes:
            directory.acquire(fresh=found.checkpoint is None or given != "auto")
            if _clean(directory, note) and given == "auto":
                found = _find(given, directory.root, directory.name, callbacks, note)
        return replace(found, version=directory.version)

    origin = on_rank_zero(world, claim)
    directory.version = origin.version
    directory.claimed = True
    return origin


def on_rank_zero(world: World, function: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result, or raise its error, on all ranks. Collective."""
    outcome: tuple[T | None, PhalanxError | None] = (None, None)
    if world.is_global_zero:
        try:
            outcome = (function(), None)
        except PhalanxError as error:
            outcome = (None, error)
    result, failure = world.broadcast_object(outcome)
    if failure is not None:
        raise failure
    return cast(T, result)


def _clean(directory: RunDirectory, note: Callable[[str], None]) -> bool:
    """Delete what a killed process left in a directory whose lock is held; say whether a checkpoint was put back."""
    interrupted = any(directory.checkpoints.glob(".*.old"))
    for folder in (directory.path, directory.checkpoints):
        clean_own(folder, note)
    return interrupted


def _find(
    given: str | Path | None, root: Path, name: str, callbacks: Sequence[Callback], note: Callable[[str], None]
) -> Origin:
    fresh = next_version(root, name)
    if given is None:
        return Origin(fresh, None)
    if given == "auto":
        for version in reversed(versions(root, name)):
            checkpoint = newest_good(RunDirectory(root, name, version).checkpoints, note, not_resumable)
            if checkpoint is not None:
                return Origin(version, checkpoint, verified=True)
        return Origin(fresh, None)
    found = find_checkpoint(given, root, name, callbacks, note, not_resumable)
    reason = not_resumable(read_manifest(found))
    if reason is not None:
        raise CheckpointError(f"ckpt_path={str(found)!r}: {reason}")
    return Origin(fresh, found)


def find_checkpoint(
    given: str | Path,
    root: Path,
    name: str,
    callbacks: Sequence[Callback],
    note: Callable[[str], None],
    refuse: Refuse | None = None,
) -> Path:
    """Return the checkpoint that a path or a word stands for. One that ``refuse`` has a reason against is passed over.

    Raises:
        CheckpointError: there is none.
    """
    if given == "best":
        paths = [getattr(callback, "best_model_path", "") for callback in callbacks]
        best = next((path for path in paths if path), "")
        if not best:
            raise CheckpointError(
                "ckpt_path='best' but no ModelCheckpoint has saved one yet: fit first, or give a path."
            )
        return Path(best)
    if given in ("last", "auto"):
        own = next((path for c in callbacks if (path := getattr(c, "last_model_path", ""))), "")
        if own:
            return Path(own)
        for version in reversed(versions(root, name)):
            checkpoint = newest_good(RunDirectory(root, name, version).checkpoints, note, refuse)
            if checkpoint is not None:
                return checkpoint
        raise CheckpointError(f"ckpt_path={given!r} but there is no good checkpoint under {root / name}.")
    return Path(given)
