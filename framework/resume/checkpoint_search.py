"""Search for the checkpoints of a run: in the versions of its directory, and in the directories of its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.callback import saved_by
from ..checkpoint import furthest, kind_of, newest_complete, newest_good, read_manifest
from ..checkpoint.manifest import Manifest, run_of
from ..core.data_spans import Span
from ..core.errors import CheckpointError
from ..launch.restart_policy import FitRecord
from ..report import best_checkpoint
from ..report.run_files import RunFiles
from ..storage.mirror import make_folders, refresh_cached
from ..system.run_directory import RunDirectory, identity_of, next_version, versions
from .preempted_save import is_name

if TYPE_CHECKING:
    from ..api.contracts import CallbackContract
    from ..checkpoint.node_folders import NodeFolders

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
class Found:
    """A checkpoint that a search has found."""

    path: Path
    verified: bool = False
    """Whether every byte of it was read and its checksums verified."""


@dataclass(frozen=True)
class Origin:
    """The start of a fit: the version of its directory, and the checkpoint to resume from, if any."""

    version: int
    checkpoint: Path | None
    verified: bool = False
    """Whether rank 0 has read every byte of the checkpoint and verified its checksums."""
    identity: str | None = None
    """The contents of the lock of the run's directory, which identify the run; None if the run does not write."""
    continues: bool = False
    """Whether the fit continues in the directory that the checkpoint was saved from."""
    memory: NodeFolders | None = None
    """The directories for snapshots that outlive the ranks, if the launch has them."""
    excluded_spans: tuple[Span, ...] = ()
    """The data that the run does not train on, by the record in its directory."""
    is_rewind: bool = False
    """Whether the fit goes back to the checkpoint, in the process that has trained further."""
    largest_micro_batch: int | None = None
    """The size of micro-batches that an earlier attempt of the launch found, as a rank ran out of memory."""

    @property
    def is_snapshot(self) -> bool:
        """Whether the checkpoint is a snapshot in memory, which ends with the launch."""
        return self.checkpoint is not None and self.memory is not None and self.checkpoint.parent == self.memory.folder


@dataclass(frozen=True)
class Search:
    """A search for checkpoints in the versions of a run's directory, and in the directories of its callbacks."""

    root: Path
    name: str
    callbacks: Sequence[CallbackContract]
    note: Callable[[str], None]
    has_fitted: bool = False
    """Whether these callbacks have been through a fit, so that they know its best checkpoint."""

    @property
    def shared(self) -> dict[Path, list[Callable[[str], bool]]]:
        """See ``shared_directories``."""
        return shared_directories(self.callbacks)

    @property
    def versions(self) -> list[int]:
        """The existing versions of the directory, in ascending order."""
        return versions(self.root, self.name)

    def refresh(self) -> None:
        """Learn which versions there are in a bucket, and what is in the directories of callbacks.

        The versions themselves are downloaded when they are searched: there may be thousands.

        Raises:
            StorageError: the service does not answer.
        """
        make_folders(self.root / self.name)
        for folder in self.shared:
            refresh_cached(folder)

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
        chosen = self.find(given, not_resumable)
        reason = not_resumable(read_manifest(chosen.path))
        if reason is not None:
            raise CheckpointError(f"ckpt_path={str(chosen.path)!r}: {reason}")
        return Origin(fresh, chosen.path, chosen.verified)

    def continued(self, before: FitRecord, memory: Path | None) -> Origin | None:
        """Return the origin for a fit that an earlier attempt of this launch began; None if it saved nothing.

        Args:
            before: the fit.
            memory: the directory of its snapshots, if there is one.
        """
        folders: list[Path] = [] if memory is None else [memory]
        refused: Refuse = not_resumable
        if before.identity is not None:
            refresh_cached(self.directory(before.version).path)
            folders += [self.directory(before.version).checkpoints, *self.shared]
            refused = only_of(before.identity, not_resumable)
        checkpoint = newest_good(folders, self.note, refused)
        return None if checkpoint is None else Origin(before.version, checkpoint, verified=True, continues=True)

    def at_interrupted(self, found: Origin, before: FitRecord | None) -> Origin:
        """Return the origin in the newest version in which replacing a checkpoint was interrupted, if there is one.

        The lock of that version is needed to restore the checkpoint.
        """
        shared = any(map(is_interrupted, self.shared))
        for version in reversed(self.versions if before is None else [before.version]):
            if shared or is_interrupted(self.directory(version).checkpoints):
                return replace(found, version=version)
        return found

    def find(self, given: str | Path, refuse: Refuse | None) -> Found:
        """Return the checkpoint for a path, ``"last"``, ``"best"`` or ``"auto"``; see ``find_checkpoint``."""
        if given == "best":
            best = next((saved.best_model_path for saved in saved_by(self.callbacks) if saved.best_model_path), "")
            return Found(Path(best or self.best()))
        if given in ("last", "auto"):
            own = next((saved.last_model_path for saved in saved_by(self.callbacks) if saved.last_model_path), "")
            if own:
                return Found(self.newest_beside(Path(own), refuse))
            newest = self.newest(refuse)
            if newest is None:
                where = " or in ".join(map(str, [self.root / self.name, *self.shared]))
                raise CheckpointError(f"ckpt_path={given!r} but there is no good checkpoint under {where}.")
            return Found(newest[1], verified=True)
        return Found(Path(given))

    def best(self) -> str:
        """Return the best checkpoint of the newest version that has one, from the files of its run.

        Raises:
            CheckpointError: there is none, or this Trainer has fitted: another run's is not its best.
        """
        for version in [] if self.has_fitted else reversed(self.versions):
            refresh_cached(self.directory(version).path)
            if (path := best_checkpoint(RunFiles(self.directory(version).path))) is not None:
                return path
        where = "" if self.has_fitted else f" in a run of {self.root / self.name}"
        raise CheckpointError(
            f"ckpt_path='best' but no ModelCheckpoint has saved one{where} yet: fit first, or give a path."
        )

    def newest_beside(self, own: Path, refuse: Refuse | None) -> Path:
        """Return the newest complete checkpoint of the run that saved ``own``, beside it or in a callback's directory.

        It is ``own`` itself unless the run has saved after it, such as after an error.
        """
        manifest = read_manifest(own)
        of_run = only_of(run_of(manifest), refuse)

        def refused(other: Manifest) -> str | None:
            return "it is older." if furthest(other) < furthest(manifest) else of_run(other)

        return newest_complete([own.parent, *self.shared], refused, own) or own

    def newest(self, refuse: Refuse | None) -> tuple[int | None, Path] | None:
        """Return the newest intact checkpoint of a run and the version that it belongs to, or None.

        Callbacks' own directories are searched for the newest version, skipping checkpoints of other runs. They are
        also searched if there is no version at all, since the run's directory may have been deleted.
        """
        existing = self.versions
        for number, version in enumerate(reversed(existing)):
            run = self.directory(version)
            refresh_cached(run.path)
            others = _passing_over_others(identity_of(run.path), refuse)
            checkpoint = newest_good([run.checkpoints, *(() if number else self.shared)], self.note, others)
            if checkpoint is not None:
                return version, checkpoint
        checkpoint = None if existing else newest_good(list(self.shared), self.note, refuse)
        return None if checkpoint is None else (None, checkpoint)


def shared_directories(callbacks: Iterable[CallbackContract]) -> dict[Path, list[Callable[[str], bool]]]:
    """Return the directories outside a run's own that callbacks save into, each with checks of checkpoint names."""
    folders: dict[Path, list[Callable[[str], bool]]] = {}
    for saved in saved_by(callbacks):
        if (place := saved.saves_into) is not None:
            folders.setdefault(place[0], [is_name]).append(place[1])
    return folders


def mirrored_folders(directory: RunDirectory, callbacks: Iterable[CallbackContract]) -> dict[Path, int | None]:
    """Return the directories of a run, its own first, and how many checkpoints of each stay on the local disk."""
    folders: dict[Path, int | None] = {directory.path: None}
    for saved in saved_by(callbacks):
        place = saved.saves_into
        folder = directory.path if place is None else place[0]
        known = [count for count in (folders.get(folder), saved.keep_local) if count is not None]
        folders[folder] = max(known, default=None)
    return folders


def newest_of_run(directory: RunDirectory, callbacks: Sequence[CallbackContract]) -> Path | None:
    """Return the complete checkpoint with the most progress from which this run can be resumed, or None.

    It is the one that ``ckpt_path="auto"`` and ``"last"`` take after the run, unless it is damaged: bytes of tensors
    are not read here.
    """
    own = next((saved.last_model_path for saved in saved_by(callbacks) if saved.last_model_path), "")
    folders = dict.fromkeys([directory.checkpoints, *shared_directories(callbacks)])
    return newest_complete(folders, only_of(directory.identity, not_resumable), Path(own) if own else None)


def only_of(identity: object, refuse: Refuse | None) -> Refuse:
    """Return a check that also refuses checkpoints that the run with this identity has not saved."""

    def refused(manifest: Manifest) -> str | None:
        if identity is None or run_of(manifest) != identity:
            return "another run saved it."
        return refuse(manifest) if refuse is not None else None

    return refused


def _passing_over_others(identity: str | None, refuse: Refuse | None) -> Refuse:
    """Return a check that also refuses checkpoints of other runs, as far as they can be recognized."""

    def refused(manifest: Manifest) -> str | None:
        theirs = run_of(manifest)
        if None not in (theirs, identity) and theirs != identity:
            return "another run saved it; give each run a dirpath of its own, or this path as ckpt_path."
        return refuse(manifest) if refuse is not None else None

    return refused


def is_interrupted(folder: Path) -> bool:
    """Whether a checkpoint in the folder was being replaced when its process was killed."""
    return any(folder.glob(".*.old"))
