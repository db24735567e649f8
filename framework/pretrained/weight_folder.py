"""``Weights``: the tensors of a Hugging Face folder, of a safetensors file or of a checkpoint, by name.

Each rank reads only its own part of a tensor. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.manifest import MANIFEST, MODEL
from ..checkpoint.reader import Checkpoint, SavedTensor, StoredTensor, open_checkpoint
from ..checkpoint.safetensors_header import (
    CHUNK_BYTES,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    PlainFile,
    byte_size,
    distinct,
    parse_header,
)
from ..checkpoint.safetensors_io import DTYPES, bytes_of
from ..core.errors import CheckpointError
from ..storage.mirror import refreshed
from ..system.atomic_files import absolute

# Of a slice along a later dim full rows are read, this number of bytes at a time.
_ROWS_BYTES = 8 << 20


class TensorFile:
    """A safetensors file: its tensors by name. Its header is checked, and its size.

    Links are followed: the cache of the Hugging Face hub consists of links.

    Raises:
        CheckpointError: the file cannot be read, is too short, or is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = self.open()
        self.size = file.size
        self.header = self._header(file)
        try:
            fields = parse_header(self.header)
            self._check(fields)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{str(path)!r} is not a safetensors file that can be read ({error}): it is damaged, or of another "
                "format."
            ) from error
        needed = max((end for *_, end in fields.values()), default=len(self.header))
        if needed != self.size:
            raise CheckpointError(
                f"{str(path)!r} has {self.size:,} bytes where its header says {needed:,}: it is damaged, or was not "
                "copied completely."
            )
        self.tensors = {
            name: FileTensor(self, name, code, shape, start) for name, (code, shape, start, _) in fields.items()
        }

    def _check(self, fields: dict[str, tuple[str, tuple[int, ...], int, int]]) -> None:
        for name, (code, shape, start, end) in fields.items():
            is_possible = code in DTYPES and min(shape, default=0) >= 0 and start >= len(self.header)
            if not is_possible or end - start != byte_size(shape, code):
                raise ValueError(f"tensor {name!r} has dtype {code!r}, shape {list(shape)} and {end - start} bytes")

    def open(self) -> PlainFile:
        """Open the file for reading.

        Raises:
            CheckpointError: it cannot be opened.
        """
        try:
            return PlainFile(self.path.resolve(strict=True))
        except OSError as error:
            raise CheckpointError(f"{str(self.path)!r} cannot be read: {error.strerror or error}.") from error

    def _header(self, file: PlainFile) -> bytes:
        length = int.from_bytes(file.read(min(8, file.size)), "little") + 8
        if file.size < 8 or length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{str(self.path)!r} is not a safetensors file: it has no header.")
        if length > file.size:
            raise CheckpointError(f"{str(self.path)!r} ends within its header: it was not copied completely.")
        return file.read(length)


class FileTensor:
    """A tensor of a safetensors file, as a ``StoredTensor``. What is read is contiguous and on the CPU."""

    __slots__ = ("_file", "_start", "dtype", "name", "shape")

    def __init__(self, file: TensorFile, name: str, code: str, shape: tuple[int, ...], start: int) -> None:
        self._file, self.name, self._start = file, name, start
        self.shape, self.dtype = shape, DTYPES[code]
        assert ITEM_BYTES[code] == self.dtype.itemsize

    def read(self) -> Tensor:
        return self.read_flat(0, prod(self.shape)).view(self.shape)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        out: Tensor = torch.empty(tuple(shape), dtype=self.dtype)
        if out.numel() == 0:
            return out
        if not shape or tuple(shape[1:]) == self.shape[1:]:
            self._fill(out, offsets[0] * prod(self.shape[1:]) if offsets else 0)
            return out
        # Whole rows of the first dim are read and cut, a few at a time.
        row = prod(self.shape[1:])
        count = max(1, _ROWS_BYTES // (row * self.dtype.itemsize))
        for first in range(0, shape[0], count):
            target = out[first : first + count]
            rows = torch.empty((len(target), *self.shape[1:]), dtype=self.dtype)
            self._fill(rows, (offsets[0] + first) * row)
            for dim, (start, size) in enumerate(zip(offsets[1:], shape[1:], strict=True), 1):
                rows = rows.narrow(dim, start, size)
            target.copy_(rows)
        return out

    def read_flat(self, start: int, length: int) -> Tensor:
        out: Tensor = torch.empty(length, dtype=self.dtype)
        self._fill(out, start)
        return out

    def _fill(self, out: Tensor, first: int) -> None:
        """Fill a contiguous tensor with the elements beginning at ``first``."""
        memory: Any = bytes_of(out)
        if len(memory):
            file = self._file.open()
            if file.size != self._file.size:
                raise CheckpointError(f"{str(self._file.path)!r} was replaced while it was read: load it again.")
            file.read_into(memory, self._start + first * self.dtype.itemsize)


# ---- folders --------------------------------------------------------------------------------------------------------


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_INDEX_BYTES = 256 << 20


@dataclass
class Weights:
    """The tensors of a folder, a file or a checkpoint. Opening them reads only headers."""

    path: Path
    tensors: dict[str, StoredTensor]
    files: list[TensorFile] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The ``config.json`` of a Hugging Face folder."""


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open a folder that transformers, timm or ``save_pretrained`` wrote, a ``.safetensors`` file, or a checkpoint.

    Raises:
        CheckpointError: there are no weights that can be read, a file is missing or damaged, the index names a file
            outside of the folder, or the weights are quantized.
    """
    given = absolute(refreshed(path))
    if (given / MANIFEST).is_file():
        checkpoint = open_checkpoint(given)
        if MODEL not in checkpoint.sections:
            raise CheckpointError(f"{str(given)!r} holds no weights; it holds: {', '.join(checkpoint.sections)}.")
        tensors = {name: SavedTensor(checkpoint, MODEL, name) for name in checkpoint.names(MODEL)}
        return Weights(given, dict(tensors), checkpoint=checkpoint)
    if not given.exists():
        raise CheckpointError(
            f"{os.fspath(path)!r} does not exist. Give a local folder; huggingface_hub.snapshot_download(name) "
            "downloads a model of the hub and returns its folder."
        )
    return _in_folder(given) if given.is_dir() else _in_files(given, [given])


def _in_folder(folder: Path) -> Weights:
    config = _json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{str(folder)!r} holds quantized weights ({CONFIG} has a quantization_config), whose values depend on "
            "scales beside them: give a folder of weights that are not quantized."
        )
    if (folder / INDEX).is_file():
        return _indexed(folder, config)
    if (folder / SINGLE).exists():
        return _in_files(folder, [folder / SINGLE], config)
    pickled = next((name for name in _PICKLES if (folder / name).exists()), None)
    if pickled is not None:
        raise CheckpointError(
            f"{str(folder)!r} holds {pickled}, which is a pickle and is not read: convert it once, with "
            "from_pretrained(...).save_pretrained(...) of transformers."
        )
    raise CheckpointError(f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}, and is not a checkpoint.")


def _indexed(folder: Path, config: dict[str, Any]) -> Weights:
    index = _json(folder / INDEX)
    homes = index.get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise CheckpointError(f"{str(folder / INDEX)!r} has no weight_map from names to files; it is damaged.")
    names = sorted(set(homes.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{str(folder / INDEX)!r} names {name!r}, which is not a .safetensors file in the same folder; it is "
                "refused."
            )
    weights = _in_files(folder, [folder / name for name in names], config)
    for name, home in homes.items():
        if name not in weights.tensors:
            raise CheckpointError(f"{str(folder / INDEX)!r} says that {home} holds {name!r}, which it does not.")
    return weights


def _in_files(path: Path, files: list[Path], config: dict[str, Any] | None = None) -> Weights:
    opened = [TensorFile(file) for file in files]
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in chain.from_iterable(file.tensors.items() for file in opened):
        if name in tensors:
            raise CheckpointError(f"{str(path)!r} holds {name!r} in two files; it is damaged.")
        tensors[name] = tensor
    return Weights(path, tensors, opened, config=config or {})


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_bytes(), object_pairs_hook=distinct)
        if not isinstance(found, dict):
            raise TypeError("it is not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from error
    return found


# ---- fingerprints ---------------------------------------------------------------------------------------------------


def fingerprint(path: str | os.PathLike[str], contents: bool = True) -> str:
    """Return a hash of the weights in a Hugging Face folder, a ``.safetensors`` file or a checkpoint.

    Equal files have equal fingerprints, whatever the folder is called and whatever else it holds.

    Args:
        path: the folder, file or checkpoint.
        contents: hash every byte. If False, only the names, the sizes and the headers of the files: that takes
            milliseconds, and does not notice other values in the same tensors.

    Returns:
        ``"xxh3-128:"`` or ``"xxh3-128-headers:"``, and 32 hex digits.

    Raises:
        CheckpointError: there are no weights that can be read.
    """
    return fingerprint_of(open_weights(path), contents)


def fingerprint_of(weights: Weights, contents: bool = True) -> str:
    """Return the fingerprint of weights that are open."""
    from xxhash import xxh3_128

    digest = xxh3_128()
    if weights.checkpoint is not None:
        # The manifest has the checksum of every file.
        digest.update(weights.checkpoint.manifest.checksum.encode())
    for file in sorted(weights.files, key=lambda file: file.path.name):
        # A single file is known by its contents: users rename it.
        name = file.path.name if len(weights.files) > 1 else ""
        digest.update(f"{name}\0{file.size}\0".encode())
        digest.update(file.header)
        if contents:
            _add_contents(digest, file)
    return f"xxh3-128{'' if contents else '-headers'}:{digest.hexdigest()}"


def _add_contents(digest: Any, file: TensorFile) -> None:
    memory, opened = memoryview(bytearray(CHUNK_BYTES)), file.open()
    if opened.size != file.size:
        raise CheckpointError(f"{str(file.path)!r} was replaced while it was read: load it again.")
    for start in range(len(file.header), file.size, CHUNK_BYTES):
        chunk = memory[: min(CHUNK_BYTES, file.size - start)]
        opened.read_into(chunk, start)
        digest.update(chunk)
