"""Writing a checkpoint: a hidden sibling is filled and synced by all ranks, the manifest last, then it is renamed.

    begin    Collective: who writes what is agreed, the hidden directory is made
    write    each rank alone, no collective: the part of this rank is written and synced
    finish   Collective: outcomes are gathered, rank 0 writes the manifest and publishes

A failure on one rank is gathered with everything else and raised on all of them; nobody waits for a rank that gave up.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic import (
    hidden_sibling,
    make_directory,
    remove_tree,
    replace_directory,
    storage_error,
    write_synced,
)
from ..errors import ConfigurationError, PhalanxError, StorageError
from ..world import World
from .manifest import JSON, MANIFEST, Manifest, Part, TensorRecord, dump, parse
from .opening import is_ours
from .plan import Agreed, Box, Plan, Snapshot, assign, plan_of
from .tensor_file import FileRecord, Segment
from .tensors import code_of, size_of, write_tensor_file

MODEL = "model"
# torch sums fewer elements than 32,768 on one thread. Threads that wait for each other on busy cores, while ranks and
# loaders run, were ten times slower.
_SERIAL_ELEMENTS = 32_767


@dataclass
class _Written:
    """What a rank tells rank 0 after writing: for each section its file and what lies in it."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    segments: dict[str, dict[str, Segment]] = field(default_factory=dict)
    nonfinite: str | None = None


def save(path: str | os.PathLike[str], snapshot: Snapshot, world: World, sharded: bool = False) -> Path:
    """Write a checkpoint and publish it as ``path``, replacing one that is there. Collective.

    With ``sharded`` every rank writes the shards that it holds (a piece that several hold is written by one of them);
    else rank 0 writes its own snapshot, which must be whole, and of the others only ``rank_document`` is kept. The
    directory must be visible to every rank that writes.

    Raises:
        ConfigurationError: on all ranks; a snapshot cannot be kept, or ``path`` is something else than a checkpoint.
        StorageError: on all ranks; a rank could not write. What was at ``path`` is still there.
    """
    pending = Save(path, snapshot, world, sharded)
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

    def __init__(self, path: str | os.PathLike[str], snapshot: Snapshot, world: World, sharded: bool = False) -> None:
        # Not resolved: a link at the end of the path is replaced itself, never what it points to.
        self.path = Path(os.path.abspath(path))
        self._snapshot = snapshot
        self._world = world
        self._sharded = sharded
        self._temporary: Path | None = None
        self._plans: list[Plan] = []
        self._agreed: Agreed = {}
        self._rank_documents: list[JSON] = []
        self._written = _Written()
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Agree on who writes what and make the hidden directory. Collective. Raises as ``save``."""
        failure: Exception | None = None
        plan: Plan = {}
        try:
            if self._world.is_global_zero:
                _check_target(self.path)
                self._temporary = hidden_sibling(self.path, "tmp")
                _make(self._temporary)
            if self._sharded or self._world.is_global_zero:
                plan = plan_of(self._snapshot)
        except Exception as error:
            failure = error
        gathered = self._agree(failure, (self._temporary, plan, self._snapshot.rank_document))
        self._temporary = gathered[0][0]
        self._plans = [plan for _, plan, _ in gathered]
        self._rank_documents = [document for _, _, document in gathered]
        # Every rank computes the same from the same plans, so a refusal here is everyone's as well.
        try:
            self._agreed = assign(self._plans)
        except ConfigurationError:
            self.discard()
            raise

    def write(self) -> None:
        """Write and sync this rank's part. A failure is kept and raised by ``finish`` on all ranks."""
        try:
            for section, tensors in self._agreed.items():
                self._write_section(section, tensors)
        except Exception as error:
            self._failure = error

    def finish(self) -> Path:
        """Gather the outcomes, write the manifest and publish. Collective. Raises as ``save``."""
        written: list[_Written] = self._agree(self._failure, self._written)
        failure: Exception | None = None
        if self._world.is_global_zero:
            try:
                self._publish(written)
            except Exception as error:
                failure = error
        # Also what all wait at until the checkpoint is there.
        self._raise_first(self._world.broadcast_object([_told(failure, self.path)]), failure)
        return self.path

    def _write_section(self, section: str, tensors: Mapping[str, str | list[tuple[int, Box]]]) -> None:
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

        def fetch(name: str) -> Tensor:
            tensor = shards[name].tensor
            trained = section == MODEL and name not in self._snapshot.buffers
            if trained and self._written.nonfinite is None and not is_finite(tensor):
                self._written.nonfinite = name
            return tensor

        assert self._temporary is not None
        path = self._temporary / f"{section}-{self._world.rank:05d}.safetensors"
        try:
            record, segments = write_tensor_file(path, mine, fetch)
        except OSError as error:
            needed = sum(size_of(shape, dtype) for _, dtype, shape in mine)
            raise storage_error("writing", path, error, needed) from error
        self._written.files[path.name] = record
        self._written.segments[section] = segments

    def _publish(self, written: list[_Written]) -> None:
        assert self._temporary is not None
        manifest = self._manifest(written)
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
        replace_directory(self._temporary, self.path)

    def _manifest(self, written: list[_Written]) -> Manifest:
        sections: dict[str, dict[str, TensorRecord | str]] = {}
        for section, tensors in self._agreed.items():
            records = sections.setdefault(section, {})
            for name, writers in tensors.items():
                records[name] = writers if isinstance(writers, str) else self._record(section, name, writers, written)
        return Manifest(
            sections=sections,
            files={name: record for outcome in written for name, record in outcome.files.items()},
            document=self._snapshot.document,
            rank_documents=self._rank_documents,
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

    def _agree(self, failure: Exception | None, payload: Any) -> list[Any]:
        """Gather each rank's outcome; raise on all ranks if one failed."""
        gathered = self._world.all_gather_object((_told(failure, self.path), payload))
        self._raise_first([told for told, _ in gathered], failure)
        return [payload for _, payload in gathered]

    def _raise_first(self, told: list[tuple[bool, str] | None], own: Exception | None) -> None:
        for rank, outcome in enumerate(told):
            if outcome is None:
                continue
            self.discard()
            is_configuration, message = outcome
            where = f"rank {rank}: " if self._world.size > 1 else ""
            kind: type[PhalanxError] = ConfigurationError if is_configuration else StorageError
            raise kind(f"checkpoint {str(self.path)!r} was not saved: {where}{message}") from own

    def discard(self) -> None:
        """Delete what was written so far, on rank 0. A failure is left to ``clean_leftovers``."""
        if self._world.is_global_zero and self._temporary is not None and self._temporary.is_dir():
            # What led here matters more.
            with contextlib.suppress(StorageError):
                remove_tree(self._temporary)


def _version() -> str:
    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "unknown"


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.device.type != "cpu":
        return _all_finite(tensor)
    return all(map(_all_finite, torch.split(tensor.reshape(-1), _SERIAL_ELEMENTS)))


def _all_finite(tensor: Tensor) -> bool:
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    # One pass without a copy. A finite sum has finite terms; an infinite one may have overflowed, so look again.
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return math.isfinite(total.item()) or bool(tensor.isfinite().all())


def has_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity, or None."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor.detach())), None)


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not (target.is_symlink() or is_ours(target)):
        raise ConfigurationError(
            f"{str(target)!r} exists and is not a checkpoint of phalanx; it is not replaced. Choose another name."
        )


def _make(directory: Path) -> None:
    try:
        make_directory(directory.parent)
        # Not synced: its name need not outlive a crash, and each sync of a directory waits for the disk.
        directory.mkdir()
    except OSError as error:
        raise storage_error("making", directory, error) from error


def _told(failure: Exception | None, path: Path) -> tuple[bool, str] | None:
    """Return what the other ranks are to know of a failure: whether it is one of configuration, and the message."""
    if failure is None:
        return None
    if isinstance(failure, OSError) and not isinstance(failure, PhalanxError):
        failure = storage_error("writing", path, failure)
    if isinstance(failure, PhalanxError):
        return isinstance(failure, ConfigurationError), str(failure)
    return False, f"{type(failure).__name__}: {failure}"
