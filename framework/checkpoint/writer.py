"""Atomic and durable writing of a checkpoint: after a crash at any time it is complete under its name, or not there.

"Complete" means a valid manifest, and every file that it names with its full size. A save has three steps on every
rank, whose order ensures durability:

    begin    Collective. Ranks agree on the rank that writes each box. Rank 0, or with ``nodes`` the first rank of each
             node, makes a hidden directory beside the target, on the same file system, so that a rename can publish
             it; no reader looks into hidden directories.
    write    No collective. Ranks write their tensor files, if any, into the hidden directory and sync them.
    finish   Collective. Rank 0 gathers the outcomes. If all ranks succeeded it
             1. writes the manifest, with a checksum of every file, last: without it nothing counts as a checkpoint;
             2. syncs the manifest and the hidden directory, so that all contents are on the disk;
             3. renames the directory to its target, exchanging an existing one in one step or by two renames;
             4. syncs the parent directory, so that the rename survives a crash as well;
             5. deletes the replaced checkpoint, which has a hidden name at this point.

A process killed before step 3 leaves the previous checkpoint and a hidden directory, which is deleted when the run is
continued (deletion.py); killed after it, the new checkpoint; killed between two renames, the previous one under a
hidden name, which is then renamed back. A rank that fails does not raise at once, since the others would wait for it:
failures are gathered in ``begin`` and ``finish``, and raised there on all ranks.

All three steps may run on a thread with a separate process group, while training continues with other tensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, NonFiniteError, PhalanxError, StorageError
from ..distributed.world import World
from ..storage.cached_url import local_place, url_of
from ..storage.mirror import after_change
from ..system.atomic_directories import HiddenDirectory, link_files, remove_tree, replace_directory
from ..system.atomic_files import absolute, storage_error, write_synced
from ..system.provenance import own_version
from .deletion import BackgroundDeletion
from .finite_check import is_finite
from .host_memory import HostPieces
from .manifest import JSON, MANIFEST, MODEL, RANKS, Box, Manifest, Part, TensorRecord, dump, is_ours, parse, text_of
from .node_folders import NodeFolders
from .safetensors_header import FileRecord, Segment
from .safetensors_io import StreamedFile, code_of, size_of, write_tensor_file
from .write_plan import Assignment, CheckpointContents, Plan, assign, plan_of


@names_arguments
def save(
    path: str | os.PathLike[str],
    contents: CheckpointContents,
    world: World,
    sharded: bool = False,
    *,
    also: str | os.PathLike[str] | None = None,
    finite: str | None = None,
    given_up: Callable[[], bool] | None = None,
    deletion: BackgroundDeletion | None = None,
    nodes: NodeFolders | None = None,
) -> Path:
    """Write a checkpoint and publish it as ``path``, replacing an existing one. Collective.

    With ``sharded`` every rank writes the shards that it holds (if several ranks hold a piece, one of them writes it);
    otherwise rank 0 writes its own contents, which must be full, and only ``rank_document`` of the other ranks is used.
    The directory must be visible to every rank that writes, unless ``nodes`` are given.

    Args:
        path: the checkpoint; with ``nodes`` in the folder of this rank's node, under the same name on all of them.
        contents: those of this rank.
        world: the ranks.
        sharded: whether every rank writes.
        also: a second name, published after the first; they share their bytes, and either can be deleted.
        finite: if given, refuse weights that are not finite; the text describes the time of capture in the message.
        given_up: called repeatedly; once it returns True on a rank, the save fails.
        deletion: deletes the replaced checkpoint on a thread. Default: delete it before returning.
        nodes: the folders of the nodes, each of which keeps the files of its own ranks and of the node before it.

    Raises:
        ConfigurationError: the contents cannot be saved, or ``path`` is not a checkpoint. Raised on all ranks.
        NonFiniteError: a weight is NaN or infinite, and ``finite`` is given.
        StorageError: a rank could not write. A previous checkpoint at ``path`` is unchanged.
    """
    pending = Save(
        path, contents, world, sharded, also=also, finite=finite, given_up=given_up, deletion=deletion, nodes=nodes
    )
    try:
        pending.begin()
        pending.write()
        return pending.finish()
    except BaseException:
        # An interrupt is not gathered over the ranks, but must not leave files behind either.
        pending.discard()
        raise


@dataclass
class _WrittenPart:
    """A rank's report to rank 0: the files that it wrote, and the positions of its tensors in the file of each
    section."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    segments: dict[str, dict[str, Segment]] = field(default_factory=dict)
    nonfinite: str | None = None


class Save:
    """One save in three steps. Its tensors must not change between ``begin`` and ``finish``.

    ``write`` is not collective, so it may run on a thread while training uses other tensors. Arguments: see ``save``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        contents: CheckpointContents,
        world: World,
        sharded: bool = False,
        *,
        also: str | os.PathLike[str] | None = None,
        finite: str | None = None,
        given_up: Callable[[], bool] | None = None,
        deletion: BackgroundDeletion | None = None,
        nodes: NodeFolders | None = None,
    ) -> None:
        # Not resolved: a link at the end of the path is replaced itself, never its target.
        self.path = absolute(local_place(path))
        self._also = None if also is None else absolute(local_place(also))
        self._contents = contents
        self._world = world
        self._sharded = sharded
        self._finite = finite
        self._given_up = given_up
        self._deletion = deletion
        self._nodes: NodeFolders | None = None
        self._leader = 0
        """The rank that makes and publishes the directory that this rank writes into."""
        if nodes is not None:
            self._share_among(nodes)
        self._hidden: list[HiddenDirectory] = []
        self._temporary: Path | None = None
        self._plans: list[Plan] = []
        self._assignment: Assignment = {}
        self._size = 0
        self._written = _WrittenPart()
        self._failure: Exception | None = None

    def _share_among(self, nodes: NodeFolders) -> None:
        if nodes.are_several:
            self._nodes, self._leader = nodes, nodes.leader

    @property
    def _what(self) -> str:
        return f"checkpoint {str(self.path)!r} was not saved"

    def begin(self) -> None:
        """Assign boxes to ranks and create the hidden directory. Collective. Raises as ``save``."""
        failure: Exception | None = None
        plan: Plan = {}
        if self._nodes is None and self._world.num_nodes > 1 and url_of(self.path) is not None:
            # Each node has a cache of its own.
            self._share_among(NodeFolders(self._world, self.path.parent, has_copies=False))
        try:
            if self._world.rank == self._leader:
                for target in filter(None, (self.path, self._also)):
                    _check_target(target)
                self._temporary = self._make_hidden(self.path)
            if self._sharded or self._world.is_global_zero:
                plan = plan_of(self._contents)
            if not self._sharded:
                # Other ranks do not need a plan if only rank 0 writes.
                self._plans = [plan]
                self._assignment = assign(self._plans)
        except Exception as error:
            failure = error
        payload = (self._temporary, plan if self._sharded else None)
        with self._discarding():
            gathered = gather_or_raise(self._world, failure, self.path, self._what, payload)
        self._temporary = gathered[self._leader][0]
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
        """Write and sync this rank's tensor files. A failure is recorded, and raised by ``finish`` on all ranks."""
        assert self._temporary is not None
        self._size = _total_bytes(self._assignment, self._plans)
        try:
            if self._deletion is not None and self._world.is_global_zero:
                # Waiting is better than a full disk: if space is needed, pending deletions of old checkpoints finish
                # first.
                self._deletion.make_room(self._temporary, self._size)
            self._write_files(self._temporary)
        except Exception as error:
            self._failure = error

    def _write_files(self, directory: Path) -> None:
        """Write and sync the boxes that are assigned to this rank.

        Raises:
            NonFiniteError: a weight is NaN or infinite, and ``finite`` was given.
            StorageError: a file could not be written, or the save was given up.
        """
        on_host = HostPieces(self._size)
        files: list[StreamedFile] = []
        try:
            for section, tensors in self._assignment.items():
                self._write_section(directory, section, tensors, files, on_host)
            # Sync all files at the end: the disk then writes the first files while the others are being produced.
            for file in files:
                try:
                    file.sync()
                except OSError as error:
                    raise self._not_written(file.path, error) from error
        finally:
            for file in files:
                file.close()

    def _write_section(
        self,
        directory: Path,
        section: str,
        tensors: Mapping[str, str | list[tuple[int, Box]]],
        files: list[StreamedFile],
        on_host: HostPieces,
    ) -> None:
        shards, own_rank = self._contents.sections.get(section, {}), self._world.rank
        own = [
            (name, shards[name].tensor.dtype, box[1])
            for name, writers in tensors.items()
            if not isinstance(writers, str)
            for rank, box in writers
            if rank == own_rank
        ]
        # Rank 0 writes a file even for a section without tensors, so that the section exists when read.
        if not own and not (own_rank == 0 and not tensors):
            return

        def check(name: str, chunk: Tensor) -> None:
            if section == MODEL and name not in self._contents.buffers:
                self._check_finite(name, chunk)
            if self._given_up is not None and self._given_up():
                raise StorageError("the save was given up, as the run ended before it was written.")

        path = directory / _file_name(section, own_rank)
        try:
            record, segments = write_tensor_file(path, own, lambda name: shards[name].tensor, check, files, on_host)
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
        """Build the error for a file that could not be written; it names the bytes of the whole checkpoint."""
        # Files written so far are useless, and would reduce the free bytes in the message.
        for name in [*self._written.files, path.name]:
            with contextlib.suppress(OSError):
                (path.parent / name).unlink()
        return storage_error("writing", path, error, self._size)

    def finish(self) -> Path:
        """Gather the outcomes, write the manifest and publish. Collective. Raises as ``save``."""
        failure, nodes = self._failure, self._nodes
        outcome = (outcome_of(failure, self.path), self._written, self._contents.rank_document)
        with self._discarding():
            gathered = self._world.gather_object(outcome)
        refusal: PhalanxError | None = None
        manifest, sizes = b"", list[dict[str, int]]()
        if gathered is not None:
            refusal = error_of([outcome for outcome, _, _ in gathered], self._what, self._world.size)
            if refusal is None:
                written = [each for _, each, _ in gathered]
                try:
                    manifest = self._manifest_bytes(written, [document for _, _, document in gathered])
                    sizes = [{name: record.size for name, record in each.files.items()} for each in written]
                    if nodes is None:
                        self._publish(manifest, sizes)
                except Exception as error:
                    failure = error
                    refusal = error_of([outcome_of(error, self.path)], self._what, self._world.size)
        # The broadcast is also the barrier: no rank returns before the checkpoint is published.
        refusal, files = self._world.broadcast_object((refusal, None if nodes is None else (manifest, sizes)))
        if refusal is None and nodes is not None and files is not None:
            failure = self._publish_on_node(nodes, *files)
            outcomes = self._world.all_gather_object(outcome_of(failure, self.path))
            refusal = error_of(outcomes, self._what, self._world.size)
        if refusal is not None:
            self.discard()
            raise refusal from failure
        return self.path

    def _publish_on_node(self, nodes: NodeFolders, manifest: bytes, sizes: list[dict[str, int]]) -> Exception | None:
        """Exchange copies with the neighbours and publish, if this rank is the first one of its node.

        The copies come first: a checkpoint counts once it outlives the loss of a node. A failure is returned.
        """
        try:
            if nodes.leads:
                assert self._temporary is not None
                nodes.copy_to_next(self._temporary, sizes, self._world)
                self._publish(manifest, ())
        except Exception as error:
            return error
        return None

    def _publish(self, manifest: bytes, sizes: Iterable[Mapping[str, int]]) -> None:
        """Publish the hidden directory, which contains these files, all synced, as the checkpoint."""
        assert self._temporary is not None
        try:
            write_synced(self._temporary / MANIFEST, manifest)
            # If a rank wrote to another disk, its file would be missed only when the checkpoint is needed.
            for name, size in (each for files in sizes for each in files.items()):
                if (self._temporary / name).stat().st_size != size:
                    raise StorageError(f"{name} is no longer {size:,} bytes long; was it changed in the meantime?")
        except OSError as error:
            raise storage_error("writing", self.path, error, len(manifest)) from error
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
        for path in filter(None, (self.path, self._also)):
            after_change(path, self._world.is_global_zero)

    def _manifest_bytes(self, written: list[_WrittenPart], rank_documents: list[JSON]) -> bytes:
        """Return the manifest."""
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
        return data

    def _manifest(self, written: list[_WrittenPart], rank_documents: list[JSON]) -> Manifest:
        sections: dict[str, dict[str, TensorRecord | str]] = {}
        for section, tensors in self._assignment.items():
            records = sections.setdefault(section, {})
            for name, writers in tensors.items():
                records[name] = writers if isinstance(writers, str) else self._record(section, name, writers, written)
        if self._contents.left_out:
            sections.setdefault(MODEL, {}).update(self._contents.left_out)
        if any(document is not None for document in rank_documents):
            sections[RANKS] = self._write_rank_documents(rank_documents, written[0])
            rank_documents = []
        return Manifest(
            sections=sections,
            files={name: record for part in written for name, record in part.files.items()},
            document=self._contents.document,
            rank_documents=rank_documents,
            nonfinite=next((part.nonfinite for part in written if part.nonfinite is not None), None),
            sharded=self._sharded,
            world_size=self._world.size,
            saved_at=time.time(),
            phalanx=own_version(),
        )

    def _write_rank_documents(self, documents: list[JSON], written: _WrittenPart) -> dict[str, TensorRecord | str]:
        """Write and sync a file of the documents of all ranks, as one that rank 0 has written."""
        assert self._temporary is not None
        path = self._temporary / _file_name(RANKS, 0)
        tensors = {
            str(rank): torch.frombuffer(bytearray(text_of(document), "ascii"), dtype=torch.uint8)
            for rank, document in enumerate(documents)
        }
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        written.files[path.name], segments = write_tensor_file(path, specs, tensors.__getitem__)
        parts = {
            name: Part(path.name, segments[name].start, (0,), shape, segments[name].xxh3_64) for name, _, shape in specs
        }
        return {name: TensorRecord(code_of(dtype, name), shape, (parts[name],)) for name, dtype, shape in specs}

    def _record(
        self, section: str, name: str, writers: list[tuple[int, Box]], written: list[_WrittenPart]
    ) -> TensorRecord:
        piece = self._plans[writers[0][0]][section][name]
        parts = []
        for rank, (offsets, shape) in writers:
            segment = written[rank].segments[section][name]
            parts.append(Part(_file_name(section, rank), segment.start, offsets, shape, segment.xxh3_64))
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
        """Delete the files written so far, on the rank that made their directory.

        ``clean_leftovers`` deletes those that cannot be deleted now.
        """
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


def _file_name(section: str, rank: int) -> str:
    """Return the name of a rank's file of a section."""
    return f"{section}-{rank:05d}.safetensors"


def _total_bytes(assignment: Assignment, plans: list[Plan]) -> int:
    """Return the total size in bytes of the tensors that all ranks write."""
    return sum(
        size_of(box[1], plans[rank][section][name].dtype)
        for section, tensors in assignment.items()
        for name, writers in tensors.items()
        if not isinstance(writers, str)
        for rank, box in writers
    )


# ---- outcomes of ranks, by which all raise the same error or none does ----------------------------------------------


Outcome: TypeAlias = "tuple[str, str] | None"
"""A failure as it is sent to the other ranks: its kind and message. None for success."""

_KINDS: dict[str, type[PhalanxError]] = {
    kind.__name__: kind for kind in (ConfigurationError, NonFiniteError, StorageError)
}


def outcome_of(failure: Exception | None, path: Path) -> Outcome:
    """Describe a failure that occurred while ``path`` was written; None for None."""
    if failure is None:
        return None
    if isinstance(failure, OSError) and not isinstance(failure, PhalanxError):
        failure = storage_error("writing", path, failure)
    for name, kind in _KINDS.items():
        if isinstance(failure, kind):
            return name, str(failure)
    return StorageError.__name__, f"{type(failure).__name__}: {failure}"


def error_of(outcomes: Sequence[Outcome], what: str, size: int) -> PhalanxError | None:
    """Return the error that all ranks raise, that of the first rank that failed; None if no rank failed.

    Args:
        outcomes: the outcome of each rank, in order.
        what: the beginning of the message.
        size: the number of ranks; the message names the rank if there are several.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            kind, message = outcome
            if kind == NonFiniteError.__name__:
                return NonFiniteError(message)
            where = f"rank {rank}: " if size > 1 else ""
            return _KINDS[kind](f"{what}: {where}{message}")
    return None


def gather_or_raise(world: World, failure: Exception | None, path: Path, what: str, payload: Any = None) -> list[Any]:
    """Gather each rank's payload; raise on all ranks if one failed. Collective.

    Args:
        world: the ranks.
        failure: the failure of this rank, if any.
        path: the file or directory that was being written.
        what: the beginning of the message.
        payload: the object of this rank, which must be picklable.

    Returns:
        The payloads of all ranks, in order.

    Raises:
        PhalanxError: the error of the first rank that failed.
    """
    gathered = world.all_gather_object((outcome_of(failure, path), payload))
    error = error_of([outcome for outcome, _ in gathered], what, world.size)
    if error is not None:
        raise error from failure
    return [payload for _, payload in gathered]
