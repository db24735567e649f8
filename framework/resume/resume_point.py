"""Choice of the checkpoint to resume from: a path, ``"last"``, ``"best"`` or ``"auto"``; rank 0 chooses for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import clean_own, clean_shared
from ..core.data_spans import Span, joined
from ..core.errors import CheckpointError, ConfigurationError, StorageError, did_you_mean
from ..distributed.collective_errors import on_rank_zero
from ..distributed.world import World
from ..launch import open_memory
from ..launch.restart_policy import FitRecord, earlier_fit, largest_micro_batch, record_fit
from ..report import rewinds_of
from ..storage.cached_url import local_place, portable
from ..storage.mirror import clean_passed_over, created, refresh_cached, refreshed, take_lease
from ..system.environment import attempt, error_dir
from ..system.run_directory import IDENTITY, RunDirectory
from .checkpoint_search import Found, Origin, Search, is_interrupted

if TYPE_CHECKING:
    from ..api.contracts import CallbackContract

WORDS = ("last", "best", "auto")


def checked_checkpoint_path(given: str | Path | None) -> str | Path | None:
    """Return the normalized checkpoint path, checked before any process starts.

    Raises:
        CheckpointError: the path does not exist.
        ConfigurationError: the path is empty.
    """
    if given is None or given in WORDS:
        return given
    if not str(given).strip():
        raise ConfigurationError(f"ckpt_path={str(given)!r} names no checkpoint: give its directory, or None for none.")
    path = refreshed(given).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"ckpt_path={str(given)!r} does not exist.{did_you_mean(str(given), WORDS)} Give a checkpoint's "
            f"directory, or one of {', '.join(map(repr, WORDS))}."
        )
    return path


def claim_directory(
    directory: RunDirectory,
    given: str | Path | None,
    callbacks: Sequence[CallbackContract],
    world: World,
    note: Callable[[str], None],
    writes: bool,
) -> Origin:
    """Choose a run's directory and the checkpoint to start from; lock the directory if the run writes. Collective.

    - ``"auto"`` continues the newest version that holds a checkpoint that verifies, or the newest version of all if the
      most advanced checkpoint is in a callback's own directory.
    - Any other value starts a new version.
    - A fit whose ranks were restarted after a failure continues its own version for any value.

    Raises:
        CheckpointError: the requested checkpoint does not exist.
        StorageError: the directory cannot be written, or another process writes to it.
    """
    search = Search(directory.root, directory.name, callbacks, note)
    # Without a launcher nothing outlives the ranks.
    memory = None if error_dir() is None else open_memory(world, note)

    def claim() -> tuple[Origin, str | None, bool]:
        search.refresh()
        earlier = _earlier_attempt(memory.folder if memory is not None and memory.is_usable else None)
        origin = _choose(search, given, earlier)
        if not writes:
            directory.adopt(origin.version, directory.claimed)
        else:
            origin = _lock(directory, search, origin, given, earlier)
        _record(directory, writes)
        origin = replace(
            origin,
            version=directory.version,
            identity=directory.identity,
            largest_micro_batch=earlier.largest_micro_batch,
            excluded_spans=excluded_by(directory) if origin.continues else (),
        )
        is_snapshot, found = replace(origin, memory=memory).is_snapshot, origin.checkpoint
        return replace(origin, checkpoint=None), None if found is None else portable(found), is_snapshot

    origin, found, is_snapshot = on_rank_zero(world, claim)
    directory.adopt(origin.version, True, origin.identity)
    checkpoint = None if found is None else local_place(found)
    if is_snapshot and memory is not None and checkpoint is not None:
        # Other nodes have it in memory of their own.
        checkpoint = memory.folder / checkpoint.name
    return replace(origin, memory=memory, checkpoint=checkpoint)


@dataclass(frozen=True)
class _EarlierAttempt:
    """The state that earlier attempts of this launch have left for the next fit."""

    fit: FitRecord | None = None
    """The same fit of the attempt before; None if this is the first attempt."""
    memory: Path | None = None
    """The directory of the fit's snapshots on node 0, if the launch has one."""
    largest_micro_batch: int | None = None
    """The size of micro-batches that was found as a rank ran out of memory."""

    def continues(self, given: str | Path | None) -> bool:
        """Whether the fit continues a run in its directory, if there is one."""
        return given == "auto" or self.fit is not None


def _earlier_attempt(memory: Path | None) -> _EarlierAttempt:
    """Read the records of this launch; without a launcher that keeps some there are none."""
    records = error_dir()
    if records is None:
        return _EarlierAttempt()
    number = attempt()
    return _EarlierAttempt(earlier_fit(records, number), memory, largest_micro_batch(records, number))


def _choose(search: Search, given: str | Path | None, earlier: _EarlierAttempt) -> Origin:
    """Return the start of a fit: that of its earlier attempt if it has saved anything, else by ``ckpt_path``."""
    again = None if earlier.fit is None else search.continued(earlier.fit, earlier.memory)
    return again or search.origin(given)


def _lock(
    directory: RunDirectory, search: Search, origin: Origin, given: str | Path | None, earlier: _EarlierAttempt
) -> Origin:
    """Lock the directory of a fit and delete what killed processes have left; return the origin after that."""
    continues = earlier.continues(given)
    if continues and origin.checkpoint is None:
        origin = search.at_interrupted(origin, earlier.fit)
    directory.adopt(origin.version, directory.claimed)
    is_fresh = origin.version not in search.versions or not continues
    directory.acquire(is_fresh)
    while is_fresh and not created(directory.path / IDENTITY):
        # Another machine has begun this version in the bucket.
        directory.release()
        directory.version += 1
        directory.acquire(fresh=True)
    if take_lease(directory.path, search.note) and continues:
        # Another machine may have saved until now.
        refresh_cached(directory.path)
        origin = replace(_choose(search, given, earlier), version=directory.version)
    # A checkpoint that was being replaced is there again after this, and may be newer than the one that was chosen. It
    # could not be chosen before, since only the holder of the lock may touch it.
    if _clean(directory, search) and continues:
        origin = _choose(search, given, earlier)
    if given == "auto":
        _clean_passed_over(directory, origin, search)
    return origin


def _record(directory: RunDirectory, writes: bool) -> None:
    """Record the fit for a later attempt of this launch, if it is one that restarts its ranks."""
    if (records := error_dir()) is not None:
        path = str(directory.path) if writes else ""
        with contextlib.suppress(OSError):
            record_fit(records, FitRecord(directory.version, path, directory.identity))


def excluded_by(directory: RunDirectory) -> tuple[Span, ...]:
    """Return the data that a run does not train on, by the record in its directory.

    Raises:
        StorageError: the record cannot be read.
    """
    return tuple(joined(span for rewind in rewinds_of(directory.path) for span in rewind.left_out))


def claim_again(directory: RunDirectory, origin: Origin, world: World) -> Origin:
    """Lock the directory of a run that goes back to a checkpoint; return the origin of its next fit. Collective.

    Args:
        origin: the origin of the fit before, with the checkpoint, which was verified.
    """

    def claim() -> Origin:
        directory.acquire(fresh=False)
        spans = excluded_by(directory)
        return replace(origin, verified=True, continues=True, is_rewind=True, excluded_spans=spans, memory=None)

    return replace(on_rank_zero(world, claim), memory=origin.memory)


def find_checkpoint(
    given: str | Path,
    root: Path,
    name: str,
    callbacks: Sequence[CallbackContract],
    note: Callable[[str], None],
    has_fitted: bool,
) -> Found:
    """Return the checkpoint that a path or keyword refers to.

    Args:
        has_fitted: whether the callbacks have been through a fit, so that they know its best checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    search = Search(root, name, callbacks, note, has_fitted)
    if given in WORDS:
        search.refresh()
    return search.find(given, None)


def _clean(directory: RunDirectory, search: Search) -> bool:
    """Delete leftovers of a killed process, under the run's lock; return whether a checkpoint was restored by it."""
    shared = search.shared
    interrupted = any(map(is_interrupted, (directory.checkpoints, *shared)))
    for folder in (directory.path, directory.checkpoints):
        clean_own(folder, search.note)
    for folder, rules in shared.items():
        clean_shared(folder, partial(_gives_any, rules), search.note)
    return interrupted


def _clean_passed_over(directory: RunDirectory, found: Origin, search: Search) -> None:
    """Delete leftovers of killed saves in versions without any checkpoint, which no run continues."""
    for version in search.versions:
        if version == directory.version or (found.checkpoint is not None and version < found.version):
            continue
        other = search.directory(version)
        with contextlib.suppress(StorageError):
            clean_passed_over(other.path)
        folders = other.path, other.checkpoints
        if any(any(folder.glob(".*.*")) for folder in folders):
            # Another process may be writing to it.
            with contextlib.suppress(StorageError):
                other.acquire(fresh=False)
                for folder in folders:
                    clean_own(folder, search.note)
                other.release()


def _gives_any(rules: Sequence[Callable[[str], bool]], name: str) -> bool:
    return any(gives(name) for gives in rules)
