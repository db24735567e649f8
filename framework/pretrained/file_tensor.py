"""Tensors of a plain safetensors file, of which each rank reads only its own part. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES, PlainFile, byte_size, parse_header
from ..checkpoint.safetensors_io import DTYPES, bytes_of
from ..core.errors import CheckpointError

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

    @property
    def file_name(self) -> str:
        """The name of the file that holds the tensor."""
        return self._file.path.name

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
