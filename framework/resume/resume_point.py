"""Choice of the checkpoint to resume from: a path, ``"last"``, ``"best"`` or ``"auto"``; rank 0 chooses for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..api.callback import saved_by
from ..checkpoint import clean_own, clean_shared, kind_of, newest_good, read_manifest
from ..checkpoint.manifest import Manifest
from ..core.errors import CheckpointError, ConfigurationError, StorageError, did_you_mean
from ..distributed.collective_errors import on_rank_zero
from ..distributed.world import World
from ..launch.restart_policy import FitRecord, earlier_fit, record_fit
from ..system.environment import attempt, error_dir
from ..system.run_directory import RunDirectory, identity_of, next_version, versions
from .preempted_save import is_name

if TYPE_CHECKING:
    from ..api.contracts import CallbackContract

T = TypeVar("T")

WORDS = ("last", "best", "auto")

Refuse = Callable[[Manifest], str | None]
_NO_TRAINING = {
    "weights": "it holds only weights, so no training can be resumed from it; start from its weights with "
    "load_from_checkpoint.",
    "fabric": "it was saved by Fabric, and holds no state of a Trainer; load it with fabric.load.",
    "other": "it was not saved by a Trainer, so no training can be resumed from it.",
}


def not_resumable(manifest: Manifest) -> str | None:
    """Return the reason why no fit can resume from an intact checkpoint, or None if it can."""
    return _NO_TRAINING.get(kind_of(manifest))


@dataclass(frozen=True)
class Origin:
    """The start of a fit: the version of its directory, and the checkpoint to resume from, if any."""

    version: int
    checkpoint: Path | None
    verified: bool = False
    """Whether rank 0 has read every byte of the checkpoint and verified its checksums."""
    identity: str | None = None
    """The lock of the run's directory, if the run writes."""
    continues: bool = False
    """Whether the fit continues in the directory that the checkpoint was saved from."""


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
    path = Path(given).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"ckpt_path={str(given)!r} does not exist.{did_you_mean(str(given), WORDS)} Give a checkpoint's "
            f"directory, or one of {', '.join(map(repr, WORDS))}."
        )
    return path


@dataclass(frozen=True)
class _Search:
    """A search for checkpoints in the versions of a run's directory, and in the directories of its callbacks."""

    root: Path
    name: str
    callbacks: Sequence[CallbackContract]
    note: Callable[[str], None]

    @property
    def shared(self) -> dict[Path, list[Callable[[str], bool]]]:
        """The directories outside the run's own that callbacks save into, each with checks of checkpoint names."""
        folders: dict[Path, list[Callable[[str], bool]]] = {}
        for saved in saved_by(self.callbacks):
            if (place := saved.saves_into) is not None:
                folders.setdefault(place[0], [is_name]).append(place[1])
        return folders

    @property
    def versions(self) -> list[int]:
        """The existing versions of the directory, in ascending order."""
        return versions(self.root, self.name)

    def directory(self, version: int) -> RunDirectory:
        """Return a version of the directory."""
        return RunDirectory(self.root, self.name, version)

    def origin(self, given: str | Path | None) -> Origin:
        """Return the start of a fit for a value of ``ckpt_path``."""
        fresh = next_version(self.root, self.name)
        if given is None:
            return Origin(fresh, None)
        if given == "auto":
            found = self.newest(not_resumable)
            if found is None:
                return Origin(fresh, None)
            version, checkpoint = found
            return Origin(fresh if version is None else version, checkpoint, verified=True, continues=True)
        path = self.find(given, not_resumable)
        reason = not_resumable(read_manifest(path))
        if reason is not None:
            raise CheckpointError(f"ckpt_path={str(path)!r}: {reason}")
        return Origin(fresh, path)

    def continued(self, before: FitRecord) -> Origin | None:
        """Return the origin for a fit that an earlier attempt of this launch began; None if it saved nothing."""
        if before.identity is None:
            return None

        def refused(manifest: Manifest) -> str | None:
            return not_resumable(manifest) if _run_of(manifest) == before.identity else "another run saved it."

        checkpoint = newest_good([self.directory(before.version).checkpoints, *self.shared], self.note, refused)
        return None if checkpoint is None else Origin(before.version, checkpoint, verified=True, continues=True)

    def at_interrupted(self, found: Origin, before: FitRecord | None) -> Origin:
        """Return the origin in the newest version in which replacing a checkpoint was interrupted, if there is one.

        The lock of that version is needed to restore the checkpoint.
        """
        shared = any(map(_is_interrupted, self.shared))
        for version in reversed(self.versions if before is None else [before.version]):
            if shared or _is_interrupted(self.directory(version).checkpoints):
                return replace(found, version=version)
        return found

    def find(self, given: str | Path, refuse: Refuse | None) -> Path:
        """Return the checkpoint for a path, ``"last"``, ``"best"`` or ``"auto"``; see ``find_checkpoint``."""
        if given == "best":
            best = next((saved.best_model_path for saved in saved_by(self.callbacks) if saved.best_model_path), "")
            if not best:
                raise CheckpointError(
                    "ckpt_path='best' but no ModelCheckpoint has saved one yet: fit first, or give a path."
                )
            return Path(best)
        if given in ("last", "auto"):
            own = next((saved.last_model_path for saved in saved_by(self.callbacks) if saved.last_model_path), "")
            if own:
                return Path(own)
            newest = self.newest(refuse)
            if newest is None:
                where = " or in ".join(map(str, [self.root / self.name, *self.shared]))
                raise CheckpointError(f"ckpt_path={given!r} but there is no good checkpoint under {where}.")
            return newest[1]
        return Path(given)

    def newest(self, refuse: Refuse | None) -> tuple[int | None, Path] | None:
        """Return the newest intact checkpoint of a run and the version that it belongs to, or None.

        Callbacks' own directories are searched for the newest version, skipping checkpoints of other runs. They are
        also searched if there is no version at all, since the run's directory may have been deleted.
        """
        existing = self.versions
        for number, version in enumerate(reversed(existing)):
            run = self.directory(version)
            others = _passing_over_others(identity_of(run.path), refuse)
            checkpoint = newest_good([run.checkpoints, *(() if number else self.shared)], self.note, others)
            if checkpoint is not None:
                return version, checkpoint
        checkpoint = None if existing else newest_good(list(self.shared), self.note, refuse)
        return None if checkpoint is None else (None, checkpoint)


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
    notes = error_dir()
    before = None if notes is None or not world.is_global_zero else earlier_fit(notes, attempt())
    search = _Search(directory.root, directory.name, callbacks, note)

    def find() -> Origin:
        again = None if before is None else search.continued(before)
        return again or search.origin(given)

    def claim() -> Origin:
        continues = given == "auto" or before is not None
        found = find()
        if writes and continues and found.checkpoint is None:
            found = search.at_interrupted(found, before)
        directory.adopt(found.version, directory.claimed)
        if writes:
            directory.acquire(fresh=found.version not in search.versions or not continues)
            # Deleting what a killed save left may bring back an older checkpoint, so look again.
            if _clean(directory, search) and continues:
                found = find()
            if given == "auto":
                _clean_passed_over(directory, found, search)
        if notes is not None:
            path = str(directory.path) if writes else ""
            with contextlib.suppress(OSError):
                record_fit(notes, FitRecord(directory.version, path, directory.identity))
        return replace(found, version=directory.version, identity=directory.identity)

    origin = on_rank_zero(world, claim)
    directory.adopt(origin.version, True, origin.identity)
    return origin


def find_checkpoint(
    given: str | Path,
    root: Path,
    name: str,
    callbacks: Sequence[CallbackContract],
    note: Callable[[str], None],
    refuse: Refuse | None = None,
) -> Path:
    """Return the checkpoint that a path or keyword refers to, skipping those for which ``refuse`` returns a reason.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    return _Search(root, name, callbacks, note).find(given, refuse)


def _clean(directory: RunDirectory, search: _Search) -> bool:
    """Delete leftovers of a killed process, under the run's lock; return whether a checkpoint was restored by it."""
    shared = search.shared
    interrupted = any(map(_is_interrupted, (directory.checkpoints, *shared)))
    for folder in (directory.path, directory.checkpoints):
        clean_own(folder, search.note)
    for folder, rules in shared.items():
        clean_shared(folder, partial(_gives_any, rules), search.note)
    return interrupted


def _clean_passed_over(directory: RunDirectory, found: Origin, search: _Search) -> None:
    """Delete leftovers of killed saves in versions without any checkpoint, which no run continues."""
    for version in search.versions:
        if version == directory.version or (found.checkpoint is not None and version < found.version):
            continue
        other = search.directory(version)
        folders = other.path, other.checkpoints
        if any(any(folder.glob(".*.*")) for folder in folders):
            # Another process may be writing to it.
            with contextlib.suppress(StorageError):
                other.acquire(fresh=False)
                for folder in folders:
                    clean_own(folder, search.note)
                other.release()


def _run_of(manifest: Manifest) -> object:
    """Return the identity of the run that saved a checkpoint; None if the checkpoint does not record it."""
    return manifest.document.get("run") if isinstance(manifest.document, dict) else None


def _passing_over_others(identity: str | None, refuse: Refuse | None) -> Refuse:
    """Return a check that also refuses checkpoints of other runs, as far as they can be recognized."""

    def refused(manifest: Manifest) -> str | None:
        theirs = _run_of(manifest)
        if None not in (theirs, identity) and theirs != identity:
            return "another run saved it; give each run a dirpath of its own, or this path as ckpt_path."
        return refuse(manifest) if refuse is not None else None

    return refused


def _is_interrupted(folder: Path) -> bool:
    return any(folder.glob(".*.old"))


def _gives_any(rules: Sequence[Callable[[str], bool]], name: str) -> bool:
    return any(gives(name) for gives in rules)
