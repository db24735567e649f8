"""One safetensors file: written in a single pass that hashes as it writes, read by ranges of bytes.

The format is the public one: 8 bytes little-endian length of the header, the header (JSON, padded with spaces to a
multiple of 8), then the tensors' bytes without gaps. The tensors lie by falling item size, so that each is aligned.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError, ConfigurationError

# Small enough to stay in the processor's cache between hashing and writing.
CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000
RESERVED_NAME = "__metadata__"

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
# A torch that lacks one of them cannot hold such a tensor either.
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _CODES.items() if hasattr(torch, name)}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file. Checksums are XXH3-64 as 16 hex digits; the header ends where data begins."""

    size: int
    header_size: int
    header_xxh3_64: str
    xxh3_64: str


@dataclass(frozen=True)
class Segment:
    """Where a tensor's bytes lie in a file, and their checksum."""

    start: int
    size: int
    xxh3_64: str


def code_of(dtype: torch.dtype, name: str) -> str:
    """Return the format's code of a dtype.

    Raises:
        ConfigurationError: safetensors has none; the message names the tensor.
    """
    if dtype not in CODES:
        hint = " Save torch.view_as_real of it." if dtype.is_complex else " Convert it first."
        raise ConfigurationError(f"tensor {name!r} is {dtype}, which safetensors files cannot hold.{hint}")
    return CODES[dtype]


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor."""
    return prod(shape) * dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory."""
    flat = tensor.detach().reshape(-1)
    memory: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(memory)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous CPU memory, itself where it is that already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def header_of(specs: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return the header's bytes for tensors in the order given, and the byte at which each starts in the file."""
    fields: dict[str, Any] = {RESERVED_NAME: {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name, dtype, shape in specs:
        end = position + size_of(shape, dtype)
        fields[name] = {"dtype": code_of(dtype, name), "shape": list(shape), "data_offsets": [position, end]}
        offsets[name] = position
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def write_tensor_file(
    path: Path,
    specs: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    fetch: Callable[[str], Tensor],
) -> tuple[FileRecord, dict[str, Segment]]:
    """Create a file of the tensors in ``specs`` (name, dtype, shape) and sync it.

    ``fetch`` is called once for each name, in the file's order, so that only one tensor has to be at hand at a time.
    """
    from xxhash import xxh3_64

    specs = sorted(specs, key=lambda spec: -spec[1].itemsize)
    header, starts = header_of(specs)
    whole = xxh3_64(header)
    segments: dict[str, Segment] = {}
    with path.open("xb", buffering=CHUNK_BYTES // 4) as file:
        file.write(header)
        for name, dtype, shape in specs:
            tensor = dense(fetch(name))
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
            memory, digest = bytes_of(tensor), xxh3_64()
            for start in range(0, len(memory), CHUNK_BYTES):
                chunk = memory[start : start + CHUNK_BYTES]
                digest.update(chunk)
                whole.update(chunk)
                file.write(chunk)
            segments[name] = Segment(starts[name], len(memory), digest.hexdigest())
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, len(header), xxh3_64(header).hexdigest(), whole.hexdigest()), segments


class PlainFile:
    """A regular file opened for reading by ranges; links, pipes and devices are refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = -1
        try:
            # Without O_NONBLOCK opening a pipe would wait for its writer.
            self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(self._handle)
        except OSError as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{str(path)!r} is not a regular file; the checkpoint is refused.")
        self.size = status.st_size

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill ``memory`` from byte ``start`` on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._handle, [memory[done:]], start + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if count == 0:
                raise CheckpointError(f"{str(self.path)!r} ends at byte {start + done}; the checkpoint is damaged.")
            done += count

    def read(self, size: int, start: int = 0) -> bytes:
        """Return ``size`` bytes from ``start`` on. Raises as ``read_into``."""
        data = bytearray(size)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def _unreadable(self, error: OSError) -> CheckpointError:
        reason = "it is a link" if self.path.is_symlink() else error.strerror
        return CheckpointError(f"{str(self.path)!r} cannot be read: {reason}. The checkpoint is damaged or incomplete.")


def open_tensor_file(path: Path, record: FileRecord) -> PlainFile:
    """Open a file and check its size and header against the manifest.

    Raises:
        CheckpointError: they differ.
    """
    from xxhash import xxh3_64_hexdigest

    file = PlainFile(path)
    if file.size != record.size:
        raise CheckpointError(
            f"{str(path)!r} has {file.size:,} bytes where the manifest says {record.size:,}; the checkpoint is damaged."
        )
    if xxh3_64_hexdigest(file.read(record.header_size)) != record.header_xxh3_64:
        raise CheckpointError(f"the header of {str(path)!r} does not match its checksum; the checkpoint is damaged.")
    return file


def parse_header(header: bytes) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return ``{name: (dtype code, shape, start, end)}`` of a header's bytes, positions counted from the file's start.

    Raises:
        ValueError: it is not a safetensors header.
    """
    length = int.from_bytes(header[:8], "little")
    if length != len(header) - 8 or length > _MAX_HEADER_BYTES:
        raise ValueError("the header's length is wrong")
    fields = json.loads(header[8:])
    fields.pop(RESERVED_NAME, None)
    found = {}
    for name, field in fields.items():
        start, end = field["data_offsets"]
        found[name] = (field["dtype"], tuple(field["shape"]), start + len(header), end + len(header))
    return found
