"""Reader of the files in which W&B keeps a run that is not, or not yet, on a server."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The file's header, and the layout that it shares with the log of LevelDB: blocks of this size, with records in parts,
# each after its checksum, length and kind.
_HEADER_BYTES = 7
_BLOCK_BYTES = 1 << 15
_PART = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def history(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a run's history, each a dict from names to values in JSON."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's file, up to where a kill cut it off; their type is W&B's ``Record``."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _contents(path.read_bytes()):
        yield Record.FromString(content)


def _contents(data: bytes) -> Iterator[bytes]:
    position, parts = _HEADER_BYTES, b""
    while position + _PART.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _PART.size:
            position += left
            continue
        checksum, length, kind = _PART.unpack_from(data, position)
        end = position + _PART.size + length
        # The checksum includes the kind, the last byte before the content.
        if end > len(data) or zlib.crc32(data[position + _PART.size - 1 : end]) != checksum:
            return
        parts += data[position + _PART.size : end]
        position = end
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
