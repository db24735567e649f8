"""Writing of one rank's part of a save: its tensor files, checked and hashed in the same pass. No collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..core.errors import NonFiniteError, StorageError
from ..system.atomic_files import storage_error
from .finite_check import is_finite
from .host_pieces import HostPieces
from .manifest import MODEL
from .safetensors_header import FileRecord, Segment
from .safetensors_io import StreamedFile, size_of, write_tensor_file
from .write_plan import Assignment, Box, Plan, Snapshot


@dataclass
class WrittenPart:
    """A rank's report to rank 0: the files that it wrote, and the positions of its tensors in the file of each
    section."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    segments: dict[str, dict[str, Segment]] = field(default_factory=dict)
    nonfinite: str | None = None


def file_name(section: str, rank: int) -> str:
    """Return the name of a rank's file of a section."""
    return f"{section}-{rank:05d}.safetensors"


def total_bytes(assignment: Assignment, plans: list[Plan]) -> int:
    """Return the total size in bytes of the tensors that all ranks write."""
    return sum(
        size_of(box[1], plans[rank][section][name].dtype)
        for section, tensors in assignment.items()
        for name, writers in tensors.items()
        if not isinstance(writers, str)
        for rank, box in writers
    )


class PartWriter:
    """Writes the boxes that ``assignment`` assigns to ``rank``.

    Args:
        target: the checkpoint, for messages.
        snapshot: this rank's tensors.
        assignment: which rank writes which box of each tensor.
        rank: this rank.
        needed_bytes: the size of the whole checkpoint, for messages.
        finite: if given, refuse weights that are NaN or infinite; the text describes the time of capture in the
            message.
        given_up: called for every piece; the save fails once it returns True.
    """

    def __init__(
        self,
        target: Path,
        snapshot: Snapshot,
        assignment: Assignment,
        rank: int,
        needed_bytes: int,
        finite: str | None,
        given_up: Callable[[], bool] | None,
    ) -> None:
        self.written = WrittenPart()
        self._target = target
        self._snapshot = snapshot
        self._assignment = assignment
        self._rank = rank
        self._needed_bytes = needed_bytes
        self._finite = finite
        self._given_up = given_up
        self._on_host = HostPieces(needed_bytes)

    def write(self, directory: Path) -> None:
        """Write and sync this rank's files.

        Raises:
            NonFiniteError: a weight is NaN or infinite, and ``finite`` is given.
            StorageError: a file could not be written, or the save was given up.
        """
        files: list[StreamedFile] = []
        try:
            for section, tensors in self._assignment.items():
                self._write_section(directory, section, tensors, files)
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
    ) -> None:
        shards = self._snapshot.sections.get(section, {})
        own = [
            (name, shards[name].tensor.dtype, box[1])
            for name, writers in tensors.items()
            if not isinstance(writers, str)
            for rank, box in writers
            if rank == self._rank
        ]
        # Rank 0 writes a file even for a section without tensors, so that the section exists when read.
        if not own and not (self._rank == 0 and not tensors):
            return

        def check(name: str, chunk: Tensor) -> None:
            if section == MODEL and name not in self._snapshot.buffers:
                self._check_finite(name, chunk)
            if self._given_up is not None and self._given_up():
                raise StorageError("the save was given up, as the run ended before it was written.")

        path = directory / file_name(section, self._rank)
        try:
            record, segments = write_tensor_file(
                path, own, lambda name: shards[name].tensor, check, files, self._on_host
            )
        except OSError as error:
            raise self._not_written(path, error) from error
        self.written.files[path.name] = record
        self.written.segments[section] = segments

    def _check_finite(self, name: str, chunk: Tensor) -> None:
        if self.written.nonfinite is not None or is_finite(chunk):
            return
        self.written.nonfinite = name
        if self._finite is not None:
            raise NonFiniteError(
                f"{name} is not finite {self._finite}, so {self._target.name} was not saved: "
                "resume from the last good checkpoint with a lower learning rate or with gradient clipping."
            )

    def _not_written(self, path: Path, error: OSError) -> StorageError:
        """Build the error for a file that could not be written; it names the bytes of the whole checkpoint."""
        # Files written so far are useless, and would reduce the free bytes in the message.
        for name in [*self.written.files, path.name]:
            with contextlib.suppress(OSError):
                (path.parent / name).unlink()
        return storage_error("writing", path, error, self._needed_bytes)
