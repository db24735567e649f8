"""Reading of checkpoints: reads only the requested bytes, and verifies them before they are returned."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError, ConfigurationError, unknown
from ..distributed.collective_errors import on_all_ranks
from ..distributed.world import World
from ..storage.cached_url import local_place, url_of
from ..storage.mirror import refreshed
from ..storage.remote_file import RemoteFile, download_file, whole_file
from . import codec
from .manifest import JSON, MODEL, RANKS, STATE, Box, Manifest, Part, TensorRecord, is_flat, parse_json, read_manifest
from .safetensors_header import CHUNK_BYTES, PlainFile, open_tensor_file
from .safetensors_io import DTYPES, bytes_of
from .verify import problems_of, was_replaced
from .write_plan import Shard, part_at

# A checkpoint of a thousand ranks has more files than a process may hold open.
_MAX_OPEN_FILES = 16


@names_arguments
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and check its manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or of a newer format version.
    """
    folder = refreshed(path).expanduser()
    return Checkpoint(folder, read_manifest(folder))


class Checkpoint:
    """An open checkpoint.

    Every read raises ``CheckpointError`` if bytes do not match the manifest, and ``UnknownNameError`` for an unknown
    section or tensor. Returned tensors are contiguous, on the CPU, and do not share memory with the file.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.document: JSON = manifest.document
        self._files: OrderedDict[str, PlainFile | RemoteFile] = OrderedDict()
        self._seen: set[str] = set()
        self._verified: set[tuple[str, int]] = set()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, sections={self.sections})"

    @cached_property
    def rank_documents(self) -> list[JSON]:
        """The state of each rank that is no tensor, by rank."""
        if RANKS not in self.manifest.sections:
            return self.manifest.rank_documents
        try:
            return [parse_json(bytes(bytes_of(self.read(RANKS, name)))) for name in sorted(self.names(RANKS), key=int)]
        except (RecursionError, ValueError) as error:
            raise CheckpointError(
                f"{str(self.path)!r}: the documents of its ranks are not ones that phalanx writes ({error})."
            ) from error

    @property
    def sections(self) -> list[str]:
        """The names of the sections."""
        return list(self.manifest.sections)

    @property
    def finite(self) -> bool:
        """Whether the model's weights were all finite when saved."""
        return self.manifest.nonfinite is None

    def names(self, section: str) -> list[str]:
        """Return the names of a section's tensors in the order saved, tied ones included."""
        return list(self._section(section))

    def aliases(self, section: str) -> dict[str, str]:
        """Map each tied name to the name that holds its data."""
        return {name: record for name, record in self._section(section).items() if isinstance(record, str)}

    @property
    def left_out(self) -> dict[str, TensorRecord]:
        """The tensors of the model that the checkpoint leaves out, by name."""
        return self.manifest.left_out

    def shape(self, section: str, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._record(section, name).shape

    def dtype(self, section: str, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return DTYPES[self._record(section, name).dtype]

    def read(self, section: str, name: str) -> Tensor:
        """Return a full tensor."""
        shape = self.shape(section, name)
        return self.read_slice(section, name, (0,) * len(shape), shape)

    def read_section(self, section: str) -> dict[str, Tensor]:
        """Return all tensors of a section; tied names share one tensor."""
        records = [record for record in self._section(section).values() if not isinstance(record, str)]
        for file in sorted({part.file for record in records for part in record.parts}):
            if len(self._files) == _MAX_OPEN_FILES:
                break
            # From a bucket, one request for a whole file takes less time than many for its ranges.
            with whole_file(self.path / file) as copy:
                if copy is not None:
                    self._files[file] = self._opened(file, copy)
        owners = self.aliases(section)
        found: dict[str, Tensor] = {}
        for name in self.names(section):
            owner = owners.get(name, name)
            if owner not in found:
                found[owner] = self.read(section, owner)
        return {name: found[owners.get(name, name)] for name in self.names(section)}

    def read_slice(self, section: str, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of ``shape`` at ``offsets`` of a tensor, assembled from the parts that overlap it.

        Raises:
            ConfigurationError: the box does not lie within the tensor.
        """
        record = self._record(section, name)
        if not _within(offsets, shape, record.shape):
            raise ConfigurationError(
                f"{section} tensor {name!r} has shape {list(record.shape)}; a box of shape {list(shape)} at"
                f" {list(offsets)} is not within it."
            )
        if not any(is_flat(record.shape, part.offsets) for part in record.parts):
            touched = parts_in_box(record, offsets, shape)
            out = self._empty(name, record, touched, tuple(shape))
            for part in touched:
                self._copy_box(name, record, part, offsets, out)
            return out
        # Parts of the flattened tensor contain full rows only, so rows are read first and the other dims are cut
        # afterwards.
        row_size = prod(record.shape[1:])
        start, length = (offsets[0] * row_size, shape[0] * row_size) if offsets else (0, 1)
        touched = parts_in_range(record, start, length)
        out = self._empty(name, record, touched, tuple(shape))
        if out.numel() == 0:
            return out
        rows = out if out.shape[1:] == record.shape[1:] else out.new_empty((*shape[:1], *record.shape[1:]))
        self._copy_range(name, record, touched, start, rows.reshape(-1))
        return out if rows is out else out.copy_(part_at(rows, shape, (0, *offsets[1:])))

    def read_flat(self, section: str, name: str, start: int, length: int) -> Tensor:
        """Return ``length`` elements, beginning at ``start``, of the flattened (row-major) tensor, as a 1-d tensor.

        Raises:
            ConfigurationError: the range does not lie within the tensor.
        """
        record = self._record(section, name)
        size = prod(record.shape)
        if start < 0 or length < 0 or start + length > size:
            raise ConfigurationError(
                f"{section} tensor {name!r} has {size:,} elements; {length:,} from {start:,} on are not within it."
            )
        if any(is_flat(record.shape, part.offsets) for part in record.parts):
            touched = parts_in_range(record, start, length)
            out = self._empty(name, record, touched, (length,))
            self._copy_range(name, record, touched, start, out)
            return out
        boxes = list(flat_boxes(record.shape, start, length)) if length else []
        inside = [parts_in_box(record, *box) for box in boxes]
        out = self._empty(name, record, [part for parts in inside for part in parts], (length,))
        position = 0
        for (offsets, extent), parts in zip(boxes, inside, strict=True):
            piece = out.narrow(0, position, prod(extent)).view(extent)
            for part in parts:
                self._copy_box(name, record, part, offsets, piece)
            position += prod(extent)
        return out

    def _empty(self, name: str, record: TensorRecord, touched: Sequence[Part], shape: tuple[int, ...]) -> Tensor:
        """Allocate memory to read into, after checking that the files to be read match the manifest.

        Other files are not opened: there is one per writing rank, and each rank of a run reads only its own part.
        """
        if record.fingerprint is not None:
            raise CheckpointError(
                f"{str(self.path)!r} leaves out {name!r}, one of {len(self.left_out)} frozen weights that it does not "
                "contain: load it into a module that is built with the same base, with load_from_checkpoint or "
                "ckpt_path=."
            )
        for part in touched:
            if part.file not in self._seen:
                self._file(part.file)
        try:
            return torch.empty(shape, dtype=DTYPES[record.dtype])
        except (MemoryError, RuntimeError) as error:
            need = prod(shape) * DTYPES[record.dtype].itemsize
            raise CheckpointError(
                f"tensor {name!r} of {str(self.path)!r} needs {need:,} bytes of memory, which are not available."
            ) from error

    def _copy_box(self, name: str, record: TensorRecord, part: Part, offsets: Sequence[int], out: Tensor) -> None:
        """Copy the elements of the box at ``offsets`` that ``part`` contains into ``out``."""
        lows = [max(a, b) for a, b in zip(offsets, part.offsets, strict=True)]
        highs = [min(a + n, b + m) for a, n, b, m in zip(offsets, out.shape, part.offsets, part.shape, strict=True)]
        extent = [high - low for low, high in zip(lows, highs, strict=True)]
        target = part_at(out, extent, [low - start for low, start in zip(lows, offsets, strict=True)])
        inside = [low - start for low, start in zip(lows, part.offsets, strict=True)]
        # Contiguous elements in the file: a range of the first dim that is not cut to one element, and all of later
        # dims.
        dim = next((dim for dim, size in enumerate(extent) if size != 1), len(extent))
        rows = (*extent[: dim + 1], *part.shape[dim + 1 :])
        first = sum(at * prod(part.shape[place + 1 :]) for place, at in enumerate(inside[: dim + 1]))
        if target.is_contiguous() and tuple(extent) == rows:
            self._read_elements(name, record, part, first, target)
            return
        buffer = torch.empty(rows, dtype=out.dtype)
        self._read_elements(name, record, part, first, buffer)
        target.copy_(part_at(buffer, extent, [*[0] * len(inside[: dim + 1]), *inside[dim + 1 :]]))

    def _copy_range(self, name: str, record: TensorRecord, touched: Sequence[Part], start: int, out: Tensor) -> None:
        """Fill the 1-d ``out`` with the elements beginning at ``start``, from the parts of the flattened tensor."""
        for part in touched:
            low = max(start, part.offsets[0])
            high = min(start + out.numel(), part.offsets[0] + part.shape[0])
            target = out.narrow(0, low - start, high - low)
            self._read_elements(name, record, part, low - part.offsets[0], target)

    def _read_elements(self, name: str, record: TensorRecord, part: Part, first: int, out: Tensor) -> None:
        """Fill the contiguous ``out`` with the elements of ``part`` beginning at ``first``.

        The first time, the checksum is computed over all bytes of the part; requested bytes are read only once.
        """
        file, memory, low = self._file(part.file), bytes_of(out), first * out.dtype.itemsize
        if (part.file, part.start) in self._verified:
            file.read_into(memory, part.start + low)
            return
        from xxhash import xxh3_64

        digest = xxh3_64()
        high, end = low + len(memory), record.size_of(part)
        scratch = memoryview(bytearray(min(CHUNK_BYTES, max(low, end - high))))
        for start, stop in ((0, low), (low, high), (high, end)):
            for position in range(start, stop, CHUNK_BYTES):
                size = min(CHUNK_BYTES, stop - position)
                wanted = start == low and stop == high
                chunk = memory[position - low : position - low + size] if wanted else scratch[:size]
                file.read_into(chunk, part.start + position)
                digest.update(chunk)
        if digest.hexdigest() != part.xxh3_64:
            where = f"{str(self.path / part.file)!r}"
            raise self._refused(f"tensor {name!r} in {where} does not match its checksum; the checkpoint is damaged.")
        self._verified.add((part.file, part.start))

    def _file(self, name: str) -> PlainFile | RemoteFile:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        while len(self._files) >= _MAX_OPEN_FILES:
            self._files.popitem(last=False)
        self._files[name] = self._opened(name, self.path / name)
        return self._files[name]

    def _opened(self, name: str, path: Path) -> PlainFile | RemoteFile:
        try:
            file = open_tensor_file(path, self.manifest.files[name])
        except CheckpointError as error:
            raise self._refused(str(error)) from error
        self._seen.add(name)
        return file

    def _refused(self, problem: str) -> CheckpointError:
        if was_replaced(self.path, self.manifest):
            return CheckpointError(f"checkpoint {str(self.path)!r} was replaced while it was read: open it again.")
        return CheckpointError(problem)

    def _section(self, section: str) -> Mapping[str, TensorRecord | str]:
        if section not in self.manifest.sections:
            raise unknown("section", section, self.manifest.sections)
        return self.manifest.sections[section]

    def _record(self, section: str, name: str) -> TensorRecord:
        records = self._section(section)
        if name not in records:
            raise unknown(f"{section} tensor", name, records)
        record = records[name]
        if isinstance(record, str):
            record = records[record]
        assert isinstance(record, TensorRecord)  # the manifest was checked: an alias names a tensor
        return record


def _within(offsets: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    if not len(offsets) == len(shape) == len(whole):
        return False
    return all(
        start >= 0 and size >= 0 and start + size <= full
        for start, size, full in zip(offsets, shape, whole, strict=True)
    )


def parts_in_box(record: TensorRecord, offsets: Sequence[int], shape: Sequence[int]) -> list[Part]:
    """Return the parts that share an element with a box."""
    return [
        part
        for part in record.parts
        if all(
            max(start, begin) < min(start + size, begin + extent)
            for start, size, begin, extent in zip(offsets, shape, part.offsets, part.shape, strict=True)
        )
    ]


def parts_in_range(record: TensorRecord, start: int, length: int) -> list[Part]:
    """Return the parts of the flattened tensor that share an element with a range of it."""
    return [
        part
        for part in record.parts
        if max(start, part.offsets[0]) < min(start + length, part.offsets[0] + part.shape[0])
    ]


def flat_boxes(shape: tuple[int, ...], start: int, length: int) -> Iterator[Box]:
    """Yield boxes that cover ``length`` elements, beginning at ``start``, of the flattened tensor, in order."""
    if not shape:
        yield (), ()
        return
    row, position, stop = prod(shape[1:]), start, start + length
    while position < stop:
        first, inside = divmod(position, row)
        size = min(row - inside, stop - position)
        if size < row:
            for offsets, extent in flat_boxes(shape[1:], inside, size):
                yield (first, *offsets), (1, *extent)
        else:
            count = (stop - position) // row
            yield (first, *(0,) * len(shape[1:])), (count, *shape[1:])
            size = count * row
        position += size


# ---- a checkpoint as one dict ---------------------------------------------------------------------------------------


@names_arguments
def weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the model's tensors by name, on the CPU; tied names share one tensor.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or holds no weights.
    """
    checkpoint = open_checkpoint(path)
    if MODEL not in checkpoint.sections:
        raise CheckpointError(
            f"{str(path)!r} holds no weights; it holds: {', '.join(checkpoint.sections) or 'nothing'}."
        )
    return checkpoint.read_section(MODEL)


@names_arguments
def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint as one dict.

    ``"state_dict"`` holds the model's tensors, ``"optimizer_tensors"`` the optimizers' by parameter, and the other keys
    hold the remaining saved values, decoded.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = open_checkpoint(path)
    tensors = {section: checkpoint.read_section(section) for section in checkpoint.sections}
    document = codec.decode(checkpoint.document, tensors.pop(STATE, {}))
    found: dict[str, Any] = dict(document) if isinstance(document, dict) else {"document": document}
    found["state_dict"] = tensors.pop(MODEL, {})
    for section, content in tensors.items():
        found[f"{section}_tensors"] = content
    return found


# ---- the same checkpoint on all ranks -------------------------------------------------------------------------------


def open_on_all_ranks(world: World, path: object, verified: bool = False) -> Checkpoint:
    """Verify every byte of a checkpoint and open it on all ranks. Collective.

    The ranks divide the files among them for verification, unless they are already ``verified``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or a different one on some rank. Raised on all ranks; the
            message names file and tensor.
    """
    given = str(path)
    if world.num_nodes > 1 and (url := url_of(given)) is not None:
        # Each node has a cache of its own.
        given = url
    place = on_all_ranks(world, lambda: refreshed(given) if world.local_rank == 0 else local_place(given))
    checkpoint = on_all_ranks(world, lambda: open_checkpoint(place))
    every = world.all_gather_object(checkpoint.manifest.checksum)
    other = next((rank for rank, one in enumerate(every) if one != every[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.path} is another checkpoint on rank {other} than on rank 0: give a path that all machines "
            "share, or copy the one checkpoint to each."
        )
    if not verified:
        _verify_together(world, checkpoint)
    return checkpoint


def _verify_together(world: World, checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    own = by_size[world.rank :: world.size]
    for name in own:
        download_file(checkpoint.path / name)
    mine = problems_of(checkpoint.path, manifest, own)
    problems = [problem for found in world.all_gather_object(mine) for problem in found]
    if problems:
        more = f" That is the first of {len(problems)} problems." if len(problems) > 1 else ""
        raise CheckpointError(
            f"checkpoint {str(checkpoint.path)!r} is refused: {problems[0]}{more} Give another one, or "
            "ckpt_path='auto' for the newest good one of the run."
        )


# ---- tensors of canonical state, from a checkpoint or from memory ---------------------------------------------------


class StoredTensor(Protocol):
    """A full tensor, of which a rank reads the part that it needs, onto the CPU."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the tensor was saved."""

    def read(self) -> Tensor:
        """Return the full tensor."""

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of ``shape`` at ``offsets``."""

    def read_flat(self, start: int, length: int) -> Tensor:
        """Return ``length`` elements, beginning at ``start``, of the flattened (row-major) tensor, as a 1-d tensor."""


class SavedTensor:
    """A tensor of a checkpoint's section."""

    __slots__ = ("_checkpoint", "_name", "_section")

    def __init__(self, checkpoint: Checkpoint, section: str, name: str) -> None:
        self._checkpoint, self._section, self._name = checkpoint, section, name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._checkpoint.shape(self._section, self._name))

    @property
    def dtype(self) -> torch.dtype:
        return self._checkpoint.dtype(self._section, self._name)

    def read(self) -> Tensor:
        return self._checkpoint.read(self._section, self._name)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self._checkpoint.read_slice(self._section, self._name, offsets, shape)

    def read_flat(self, start: int, length: int) -> Tensor:
        return self._checkpoint.read_flat(self._section, self._name, start, length)


class HeldShard:
    """A piece of a tensor that this rank has in memory, such as the full tensor; only parts of it can be read."""

    __slots__ = ("_shard", "dtype", "shape")

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.shape, self.dtype = shard.shape, shard.tensor.dtype

    def read(self) -> Tensor:
        return self.read_slice((0,) * len(self.shape), self.shape)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        piece = self._shard
        if not prod(shape):
            return piece.tensor.new_empty(tuple(shape))
        return part_at(piece.tensor, shape, [start - own for start, own in zip(offsets, piece.offsets, strict=True)])

    def read_flat(self, start: int, length: int) -> Tensor:
        piece = self._shard
        # A box of several dims is not a range of the flattened tensor, unless it covers the tensor.
        assert not length or piece.tensor.dim() == 1 or tuple(piece.tensor.shape) == piece.shape
        begin = piece.offsets[0] if piece.offsets else 0
        return piece.tensor.reshape(-1).narrow(0, start - begin if length else 0, length)


StoredTensors = Mapping[str, StoredTensor]


def read_piece(stored: StoredTensor, shard: Shard) -> Tensor:
    """Read the piece of a stored tensor that corresponds to a shard."""
    if is_flat(shard.shape, shard.offsets):
        return stored.read_flat(shard.offsets[0], shard.tensor.numel())
    return stored.read_slice(shard.offsets, tuple(shard.tensor.shape))


def held(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Wrap tensors in memory as stored tensors."""
    return {name: HeldShard(Shard.whole(tensor.detach())) for name, tensor in tensors.items()}
