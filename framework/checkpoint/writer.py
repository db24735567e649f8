"""Atomic and durable writing of a checkpoint: after a crash at any time it is complete under its name, or not there.

"Complete" means a valid manifest, and every file that it names with its full size. A save has three steps on every
rank, whose order ensures durability:

    begin    Collective. Ranks agree on the rank that writes each box. Rank 0 makes a hidden directory beside the
             target, on the same file system, so that a rename can publish it; no reader looks into hidden directories.
    write    No collective. Ranks write their tensor files, if any, into the hidden directory and sync them.
    finish   Collective. Rank 0 gathers the outcomes. If all ranks succeeded it
             1. writes the manifest, with a checksum of every file, last: without it nothing counts as a checkpoint;
             2. syncs the manifest and the hidden directory, so that all contents are on the disk;
             3. renames the directory to its target, exchanging an existing one in one step or by two renames;
             4. syncs the parent directory, so that the rename survives a crash as well;
             5. deletes the replaced checkpoint, which has a hidden name at this point.

A process killed before step 3 leaves the previous checkpoint and a hidden directory, which is deleted when the run is
continued (stale_files.py); killed after it, the new checkpoint; killed between two renames, the previous one under a
hidden name, which is then renamed back. A rank that fails does not raise at once, since the others would wait for it:
failures are gathered in ``begin`` and ``finish``, and raised there on all ranks.

All three steps may run on a thread with a separate process group, while training continues with other tensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, PhalanxError, StorageError
from ..distributed.world import World
from ..system.atomic_directories import HiddenDirectory, remove_tree, replace_directory
from ..system.atomic_files import absolute, storage_error, write_synced
from ..system.provenance import own_version
from .background_deletion import BackgroundDeletion
from .manifest import JSON, MANIFEST, MODEL, Manifest, Part, TensorRecord, dump, parse
from .manifest_file import is_ours
from .part_writer import PartWriter, WrittenPart, file_name, total_bytes
from .retention import link_files
from .safetensors_io import code_of
from .save_errors import error_of, gather_or_raise, outcome_of
from .write_plan import Assignment, Box, Plan, Snapshot, assign, plan_of


@names_arguments
def save(
    path: str | os.PathLike[str],
    snapshot: Snapshot,
    world: World,
    sharded: bool = False,
    *,
    also: str | os.PathLike[str] | None = None,
    finite: str | None = None,
    given_up: Callable[[], bool] | None = None,
    deletion: BackgroundDeletion | None = None,
) -> Path:
    """Write a checkpoint and publish it as ``path``, replacing an existing one. Collective.

    With ``sharded`` every rank writes the shards that it holds (if several ranks hold a piece, one of them writes it);
    otherwise rank 0 writes its own snapshot, which must be full, and only ``rank_document`` of the other ranks is used.
    The directory must be visible to every rank that writes.

    Args:
        path: the checkpoint.
        snapshot: this rank's contents.
        world: the ranks.
        sharded: whether every rank writes.
        also: a second name, published after the first; they share their bytes, and either can be deleted.
        finite: if given, refuse weights that are not finite; the text describes the time of capture in the message.
        given_up: called repeatedly; once it returns True on a rank, the save fails.
        deletion: deletes the replaced checkpoint on a thread. Default: delete it before returning.

    Raises:
        ConfigurationError: a snapshot cannot be saved, or ``path`` is not a checkpoint. Raised on all ranks.
        NonFiniteError: a weight is NaN or infinite, and ``finite`` is given.
        StorageError: a rank could not write. A previous checkpoint at ``path`` is unchanged.
    """
    pending = Save(path, snapshot, world, sharded, also=also, finite=finite, given_up=given_up, deletion=deletion)
    try:
        pending.begin()
        pending.write()
        return pending.finish()
    except BaseException:
        # An interrupt is not gathered over the ranks, but must not leave files behind either.
        pending.discard()
        raise


class Save:
    """One save in three steps. The tensors of the snapshot must not change between ``begin`` and ``finish``.

    ``write`` is not collective, so it may run on a thread while training uses other tensors. Arguments: see ``save``.
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
        deletion: BackgroundDeletion | None = None,
    ) -> None:
        # Not resolved: a link at the end of the path is replaced itself, never its target.
        self.path = absolute(path)
        self._also = None if also is None else absolute(also)
        self._snapshot = snapshot
        self._world = world
        self._sharded = sharded
        self._finite = finite
        self._given_up = given_up
        self._deletion = deletion
        self._hidden: list[HiddenDirectory] = []
        self._temporary: Path | None = None
        self._plans: list[Plan] = []
        self._assignment: Assignment = {}
        self._written = WrittenPart()
        self._failure: Exception | None = None

    @property
    def _what(self) -> str:
        return f"checkpoint {str(self.path)!r} was not saved"

    def begin(self) -> None:
        """Assign boxes to ranks and create the hidden directory. Collective. Raises as ``save``."""
        failure: Exception | None = None
        plan: Plan = {}
        try:
            if self._world.is_global_zero:
                for target in filter(None, (self.path, self._also)):
                    _check_target(target)
                self._temporary = self._make_hidden(self.path)
            if self._sharded or self._world.is_global_zero:
                plan = plan_of(self._snapshot)
            if not self._sharded:
                # Other ranks do not need a plan if only rank 0 writes.
                self._plans = [plan]
                self._assignment = assign(self._plans)
        except Exception as error:
            failure = error
        payload = (self._temporary, plan if self._sharded else None)
        with self._discarding():
            gathered = gather_or_raise(self._world, failure, self.path, self._what, payload)
        self._temporary = gathered[0][0]
        if self._sharded:
            self._plans = [plan for _, plan in gathered]
            # Every rank computes the same from the same plans, so all ranks raise if one does.
            with self._discarding():
                self._assignment = assign(self._plans)

    def _make_hidden(self, target: Path) -> Path:
        try:
            self._hidden.append(HiddenDirectory(target))
        except OSError as error:
            raise storage_error("making", target.parent, error) from error
        return self._hidden[-1].path

    def write(self) -> None:
        """Write and sync this rank's part. A failure is recorded, and raised by ``finish`` on all ranks."""
        assert self._temporary is not None
        size, rank = total_bytes(self._assignment, self._plans), self._world.rank
        part = PartWriter(self.path, self._snapshot, self._assignment, rank, size, self._finite, self._given_up)
        self._written = part.written
        try:
            if self._deletion is not None and self._world.is_global_zero:
                # Waiting is better than a full disk: if space is needed, pending deletions of old checkpoints finish
                # first.
                self._deletion.make_room(self._temporary, size)
            part.write(self._temporary)
        except Exception as error:
            self._failure = error

    def finish(self) -> Path:
        """Gather the outcomes, write the manifest and publish. Collective. Raises as ``save``."""
        failure = self._failure
        outcome = (outcome_of(failure, self.path), self._written, self._snapshot.rank_document)
        with self._discarding():
            gathered = self._world.gather_object(outcome)
        refusal: PhalanxError | None = None
        if gathered is not None:
            refusal = error_of([outcome for outcome, _, _ in gathered], self._what, self._world.size)
            if refusal is None:
                try:
                    self._publish([written for _, written, _ in gathered], [document for _, _, document in gathered])
                except Exception as error:
                    failure = error
                    refusal = error_of([outcome_of(error, self.path)], self._what, self._world.size)
        # The broadcast is also the barrier: no rank returns before the checkpoint is published.
        refusal = self._world.broadcast_object(refusal)
        if refusal is not None:
            self.discard()
            raise refusal from failure
        return self.path

    def _publish(self, written: list[WrittenPart], rank_documents: list[JSON]) -> None:
        """Publish the hidden directory, which contains every rank's synced files, as the checkpoint. Only on rank 0."""
        assert self._temporary is not None
        data, files = self._manifest_bytes(written, rank_documents)
        try:
            write_synced(self._temporary / MANIFEST, data)
            # If a rank wrote to another disk, its file would be missed only when the checkpoint is needed.
            for name, size in files.items():
                if (self._temporary / name).stat().st_size != size:
                    raise StorageError(f"{name} is no longer {size:,} bytes long; was it changed in the meantime?")
        except OSError as error:
            raise storage_error("writing", self.path, error, len(data)) from error
        # Operations that may fail for lack of space precede the first rename.
        second = None if self._also is None else self._make_hidden(self._also)
        if second is not None:
            link_files(self._temporary, second)
        discard = None if self._deletion is None else self._deletion.add
        # Syncs the directory, renames it, syncs the parent, and then deletes the replaced checkpoint.
        replace_directory(self._temporary, self.path, discard)
        if second is not None and self._also is not None:
            replace_directory(second, self._also, discard)
        self._release()

    def _manifest_bytes(self, written: list[WrittenPart], rank_documents: list[JSON]) -> tuple[bytes, dict[str, int]]:
        """Return the manifest, and the size of every file that it names."""
        manifest = self._manifest(written, rank_documents)
        try:
            data = dump(manifest)
            strict = parse(data).document == manifest.document
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"a document is not strict JSON ({error}); pass it through codec.encode."
            ) from error
        if not strict:
            raise ConfigurationError("the document has keys that are not strings; pass it through codec.encode.")
        return data, {name: record.size for name, record in manifest.files.items()}

    def _manifest(self, written: list[WrittenPart], rank_documents: list[JSON]) -> Manifest:
        sections: dict[str, dict[str, TensorRecord | str]] = {}
        for section, tensors in self._assignment.items():
            records = sections.setdefault(section, {})
            for name, writers in tensors.items():
                records[name] = writers if isinstance(writers, str) else self._record(section, name, writers, written)
        if self._snapshot.left_out:
            sections.setdefault(MODEL, {}).update(self._snapshot.left_out)
        return Manifest(
            sections=sections,
            files={name: record for part in written for name, record in part.files.items()},
            document=self._snapshot.document,
            rank_documents=rank_documents,
            nonfinite=next((part.nonfinite for part in written if part.nonfinite is not None), None),
            sharded=self._sharded,
            world_size=self._world.size,
            saved_at=time.time(),
            phalanx=own_version(),
        )

    def _record(
        self, section: str, name: str, writers: list[tuple[int, Box]], written: list[WrittenPart]
    ) -> TensorRecord:
        piece = self._plans[writers[0][0]][section][name]
        parts = []
        for rank, (offsets, shape) in writers:
            segment = written[rank].segments[section][name]
            parts.append(Part(file_name(section, rank), segment.start, offsets, shape, segment.xxh3_64))
        return TensorRecord(code_of(piece.dtype, name), piece.shape, tuple(parts))

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """Delete the written files if the block fails."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete the files written so far, on rank 0. ``clean_leftovers`` deletes those that cannot be deleted now."""
        for hidden in self._hidden:
            # The error that led to this call is more important.
            with contextlib.suppress(StorageError):
                if hidden.path.is_dir():
                    remove_tree(hidden.path)
        self._release()

    def _release(self) -> None:
        for hidden in self._hidden:
            hidden.release()


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not (target.is_symlink() or is_ours(target)):
        raise ConfigurationError(
            f"{str(target)!r} exists and is not a checkpoint of phalanx; it is not replaced. Choose another name."
        )
