"""Writing a checkpoint: a hidden sibling is filled and synced by all ranks, the manifest last, then it is renamed.

    begin    Collective: who writes what is agreed, the hidden directory is made
    write    each rank alone, no collective: the part of this rank is written and synced
    finish   Collective: rank 0 is told the outcomes, writes the manifest and publishes

A failure on one rank is gathered with everything else and raised on all of them; nobody waits for a rank that gave up.
All three may run on a thread of its own, on a world of its own, while training goes on with other tensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import Tensor

from ..core.errors import ConfigurationError, NonFiniteError, PhalanxError, StorageError
from ..distributed.world import World
from ..system.atomic_files import HiddenDirectory, absolute, remove_tree, replace_directory, storage_error, write_synced
from .direct_io import DirectFile
from .finite_check import is_finite
from .manifest import JSON, MANIFEST, Manifest, Part, TensorRecord, dump, parse
from .manifest_file import is_ours
from .retention import link_files
from .safetensors_header import FileRecord, Segment
from .safetensors_io import code_of, size_of, write_tensor_file
from .save_errors import agree, error_of, tell
from .write_plan import Agreed, Box, Plan, Snapshot, assign, plan_of

MODEL = "model"


@dataclass
class _Written:
    """What a rank tells rank 0 after writing: for each section its file and what lies in it."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    segments: dict[str, dict[str, Segment]] = field(default_factory=dict)
    nonfinite: str | None = None


def save(
    path: str | os.PathLike[str],
    snapshot: Snapshot,
    world: World,
    sharded: bool = False,
    *,
    also: str | os.PathLike[str] | None = None,
    finite: str | None = None,
    given_up: Callable[[], bool] | None = None,
) -> Path:
    """Write a checkpoint and publish it as ``path``, replacing one that is there. Collective.

    With ``sharded`` every rank writes the shards that it holds (a piece that several hold is written by one of them);
    else rank 0 writes its own snapshot, which must be whole, and of the others only ``rank_document`` is kept. The
    directory must be visible to every rank that writes.

    Args:
        path: the checkpoint.
        snapshot: what this rank has to save.
        world: the ranks.
        sharded: whether every rank writes.
        also: a second name; the two share their bytes, and either can be deleted without the other.
        finite: refuse weights that are not finite; says when they were taken, for the message.
        given_up: asked now and then; where it says so on a rank, the save fails.

    Raises:
        ConfigurationError: on all ranks; a snapshot cannot be kept, or ``path`` is something else than a checkpoint.
        NonFiniteError: on all ranks; a weight is NaN or infinite, and ``finite`` is given.
        StorageError: on all ranks; a rank could not write. What was at ``path`` is still there.
    """
    pending = Save(path, snapshot, world, sharded, also=also, finite=finite, given_up=given_up)
    try:
        pending.begin()
        pending.write()
        return pending.finish()
    except BaseException:
        # An interrupt is no failure that is gathered, yet leaves nothing behind either.
        pending.discard()
        raise


class Save:
    """One save in three steps. Between ``begin`` and ``finish`` the tensors of the snapshot may not change.

    ``write`` takes part in no collective, so it may run on a thread of its own while training uses other tensors.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        snapshot: Snapshot,
        world: World,
        sharded: bool = False,
        *,
        also: str | os.PathLike[str] | None = None,
        finite: str | None = None,
        given_up: Callable[[], bool] | None = None,
    ) -> None:
        # Not resolved: a link at the end of the path is replaced itself, never what it points to.
        self.path = absolute(path)
        self._also = None if also is None else absolute(also)
        self._snapshot = snapshot
        self._world = world
        self._sharded = sharded
        self._finite = finite
        self._given_up = given_up
        self._held: list[HiddenDirectory] = []
        self._temporary: Path | None = None
        self._plans: list[Plan] = []
        self._agreed: Agreed = {}
        self._written = _Written()
        self._failure: Exception | None = None

    @property
    def _what(self) -> str:
        return f"checkpoint {str(self.path)!r} was not saved"

    def begin(self) -> None:
        """Agree on who writes what and make the hidden directory. Collective. Raises as ``save``."""
        failure: Exception | None = None
        plan: Plan = {}
        try:
            if self._world.is_global_zero:
                for target in filter(None, (self.path, self._also)):
                    _check_target(target)
                self._temporary = self._hidden(self.path)
            if self._sharded or self._world.is_global_zero:
                plan = plan_of(self._snapshot)
            if not self._sharded:
                # Nobody else needs to know what rank 0 alone writes.
                self._plans = [plan]
                self._agreed = assign(self._plans)
        except Exception as error:
            failure = error
        payload = (self._temporary, plan if self._sharded else None)
        with self._discarding():
            gathered = agree(self._world, failure, self.path, self._what, payload)
        self._temporary = gathered[0][0]
        if self._sharded:
            self._plans = [plan for _, plan in gathered]
            # Every rank computes the same from the same plans, so a refusal here is everyone's as well.
            with self._discarding():
                self._agreed = assign(self._plans)

    def _hidden(self, target: Path) -> Path:
        try:
            self._held.append(HiddenDirectory(target))
        except OSError as error:
            raise storage_error("making", target.parent, error) from error
        return self._held[-1].path

    def write(self) -> None:
        """Write and sync this rank's part. A failure is kept and raised by ``finish`` on all ranks."""
        files: list[DirectFile] = []
        try:
            for section, tensors in self._agreed.items():
                self._write_section(section, tensors, files)
            # At the end: the disk was at work on the first files while the others were written.
            for file in files:
                self._sync(file)
        except Exception as error:
            self._failure = error
        finally:
            for file in files:
                file.close()

    def finish(self) -> Path:
        """Gather the outcomes, write the manifest and publish. Collective. Raises as ``save``."""
        failure = self._failure
        outcome = (tell(failure, self.path), self._written, self._snapshot.rank_document)
        with self._discarding():
            gathered = self._world.gather_object(outcome)
        refusal: PhalanxError | None = None
        if gathered is not None:
            refusal = error_of([told for told, _, _ in gathered], self._what, self._world.size)
            if refusal is None:
                try:
                    self._publish([written for _, written, _ in gathered], [document for _, _, document in gathered])
                except Exception as error:
                    failure = error
                    refusal = error_of([tell(error, self.path)], self._what, self._world.size)
        # Also what all wait at until the checkpoint is there.
        refusal = self._world.broadcast_object(refusal)
        if refusal is not None:
            self.discard()
            raise refusal from failure
        return self.path

    def _sync(self, file: DirectFile) -> None:
        try:
            file.sync()
        except OSError as error:
            raise self._not_written(file.path, error) from error

    def _write_section(
        self, section: str, tensors: Mapping[str, str | list[tuple[int, Box]]], files: list[DirectFile]
    ) -> None:
        shards = self._snapshot.sections.get(section, {})
        mine = [
            (name, shards[name].tensor.dtype, box[1])
            for name, writers in tensors.items()
            if not isinstance(writers, str)
            for rank, box in writers
            if rank == self._world.rank
        ]
        # Rank 0 writes a file for a section without tensors too, so that its existence is kept.
        if not mine and not (self._world.is_global_zero and not tensors):
            return

        def look(name: str, chunk: Tensor) -> None:
            if section == MODEL and name not in self._snapshot.buffers:
                self._check_finite(name, chunk)
            if self._given_up is not None and self._given_up():
                raise StorageError("it was given up, as the run ended before it was written.")

        assert self._temporary is not None
        path = self._temporary / f"{section}-{self._world.rank:05d}.safetensors"
        try:
            record, segments = write_tensor_file(path, mine, lambda name: shards[name].tensor, look, files)
        except OSError as error:
            raise self._not_written(path, error) from error
        self._written.files[path.name] = record
        self._written.segments[section] = segments

    def _check_finite(self, name: str, chunk: Tensor) -> None:
        if self._written.nonfinite is not None or is_finite(chunk):
            return
        self._written.nonfinite = name
        if self._finite is not None:
            raise NonFiniteError(
                f"{name} is not finite {self._finite}, so {self.path.name} was not saved: "
                "resume from the last good checkpoint with a lower learning rate or with gradient clipping."
            )

    def _not_written(self, path: Path, error: OSError) -> StorageError:
        """Build the error of a file that could not be written, with the bytes of the whole checkpoint."""
        # What lies there already is no use, and would count as taken in what is told of free bytes.
        for name in [*self._written.files, path.name]:
            with contextlib.suppress(OSError):
                (path.parent / name).unlink()
        boxes = (
            size_of(box[1], self._plans[rank][section][name].dtype)
            for section, tensors in self._agreed.items()
            for name, writers in tensors.items()
            if not isinstance(writers, str)
            for rank, box in writers
        )
        return storage_error("writing", path, error, sum(boxes))

    def _publish(self, written: list[_Written], rank_documents: list[JSON]) -> None:
        assert self._temporary is not None
        manifest = self._manifest(written, rank_documents)
        try:
            data = dump(manifest)
            strict = parse(data).document == manifest.document
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"a document is not strict JSON ({error}); pass it through codec.encode."
            ) from error
        if not strict:
            raise ConfigurationError("the document has keys that are no strings; pass it through codec.encode.")
        try:
            write_synced(self._temporary / MANIFEST, data)
            # A file whose rank saw another disk would be missing only later, when it is needed.
            for name, record in manifest.files.items():
                if (self._temporary / name).stat().st_size != record.size:
                    raise StorageError(f"{name} is not {record.size:,} bytes long any more; was it changed meanwhile?")
        except OSError as error:
            raise storage_error("writing", self.path, error, len(data)) from error
        # All that may fail for lack of room is done before the first name changes.
        second = None if self._also is None else self._hidden(self._also)
        if second is not None:
            link_files(self._temporary, second)
        replace_directory(self._temporary, self.path)
        if second is not None and self._also is not None:
            replace_directory(second, self._also)
        self._release()

    def _manifest(self, written: list[_Written], rank_documents: list[JSON]) -> Manifest:
        sections: dict[str, dict[str, TensorRecord | str]] = {}
        for section, tensors in self._agreed.items():
            records = sections.setdefault(section, {})
            for name, writers in tensors.items():
                records[name] = writers if isinstance(writers, str) else self._record(section, name, writers, written)
        return Manifest(
            sections=sections,
            files={name: record for outcome in written for name, record in outcome.files.items()},
            document=self._snapshot.document,
            rank_documents=rank_documents,
            nonfinite=next((one.nonfinite for one in written if one.nonfinite is not None), None),
            sharded=self._sharded,
            world_size=self._world.size,
            saved_at=time.time(),
            phalanx=_version(),
        )

    def _record(self, section: str, name: str, writers: list[tuple[int, Box]], written: list[_Written]) -> TensorRecord:
        piece = self._plans[writers[0][0]][section][name]
        parts = []
        for rank, (offsets, shape) in writers:
            segment = written[rank].segments[section][name]
            file = f"{section}-{rank:05d}.safetensors"
            parts.append(Part(file, segment.start, offsets, shape, segment.xxh3_64))
        return TensorRecord(code_of(piece.dtype, name), piece.shape, tuple(parts))

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """Leave nothing behind where the block fails."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete what was written so far, on rank 0. A failure is left to ``clean_leftovers``."""
        for held in self._held:
            # What led here matters more.
            with contextlib.suppress(StorageError):
                if held.path.is_dir():
                    remove_tree(held.path)
        self._release()

    def _release(self) -> None:
        for held in self._held:
            held.release()


def _version() -> str:
    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "unknown"


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not (target.is_symlink() or is_ours(target)):
        raise ConfigurationError(
            f"{str(target)!r} exists and is not a checkpoint of phalanx; it is not replaced. Choose another name."
        )
