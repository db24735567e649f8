"""One safetensors file as bytes: its header, its checksums, reading by ranges. Needs no torch.

The format is the public one: 8 bytes little-endian length of the header, the header (JSON, padded with spaces to a
multiple of 8), then the tensors' bytes without gaps. Tensors are sorted by decreasing item size, so that each is
aligned.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..storage.remote_file import RemoteFile, remote_file

# Small enough to stay in the processor's cache between hashing and writing.
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 100_000_008
"""The longest header, its length included, that readers of safetensors take."""
RESERVED_NAME = "__metadata__"

# By the format's code of a dtype: torch's name of it, and the bytes of an element.
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}
TORCH_NAMES = {code: name for code, (name, _) in _DTYPES.items()}
ITEM_BYTES = {code: size for code, (_, size) in _DTYPES.items()}


@dataclass(frozen=True)
class FileRecord:
    """The manifest's record of a file. Checksums are XXH3-64 as 16 hex digits; the header ends where data begins."""

    size: int
    header_size: int
    header_xxh3_64: str
    xxh3_64: str


@dataclass(frozen=True)
class Segment:
    """The range of a tensor's bytes in a file, and their checksum."""

    start: int
    size: int
    xxh3_64: str


def byte_size(shape: Sequence[int], code: str) -> int:
    """Return the bytes of a dense tensor."""
    return prod(shape) * ITEM_BYTES[code]


def header_of(specs: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return the header's bytes for tensors (name, code, shape) in order, and the byte at which each starts."""
    fields: dict[str, Any] = {RESERVED_NAME: {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name, code, shape in specs:
        end = position + byte_size(shape, code)
        fields[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        offsets[name] = position
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


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
        """Fill ``memory`` with the bytes beginning at ``start``.

        Raises:
            CheckpointError: the file is too short or cannot be read.
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
        """Return ``size`` bytes, beginning at ``start``. Raises as ``read_into``."""
        data = bytearray(size)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def _unreadable(self, error: OSError) -> CheckpointError:
        reason = "it is a link" if self.path.is_symlink() else error.strerror
        return CheckpointError(f"{str(self.path)!r} cannot be read: {reason}. The checkpoint is damaged or incomplete.")


def open_tensor_file(path: Path, record: FileRecord) -> PlainFile | RemoteFile:
    """Open a file and check its size and header against the manifest.

    One that is in the cache of a bucket and has no local copy is read from the bucket.

    Raises:
        CheckpointError: they differ.
    """
    from xxhash import xxh3_64_hexdigest

    try:
        file: PlainFile | RemoteFile = PlainFile(path)
    except CheckpointError:
        remote = None if os.path.lexists(path) else remote_file(path)
        if remote is None:
            raise
        file = remote
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
        ValueError, TypeError, LookupError, AttributeError, RecursionError: it is not a safetensors header.
    """
    length = int.from_bytes(header[:8], "little")
    if length != len(header) - 8 or len(header) > MAX_HEADER_BYTES:
        raise ValueError("the header's length is wrong")
    fields = json.loads(header[8:], object_pairs_hook=distinct)
    texts = fields.pop(RESERVED_NAME, {})
    if type(texts) is not dict or any(type(text) is not str for text in texts.values()):
        raise TypeError(f"{RESERVED_NAME} is not a map from text to text")
    found = {}
    for name, field in fields.items():
        start, end = _counts(field["data_offsets"])
        found[name] = (field["dtype"], _counts(field["shape"]), start + len(header), end + len(header))
    return found


def _counts(values: Any) -> tuple[int, ...]:
    # 3.0 and true equal numbers here, but not for other readers.
    if type(values) is not list or any(type(value) is not int for value in values):
        raise TypeError(f"{values!r} is not a list of counts")
    return tuple(values)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of an object's pairs; for ``json.loads``. Raises ``ValueError`` if a key appears twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return found
