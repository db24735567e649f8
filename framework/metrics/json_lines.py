"""``JsonLines``: a file with one JSON object on each line, to which whole lines are appended."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Enough to find the end of the last whole line in one or two reads.
_BLOCK_BYTES = 1 << 16


class JsonLines:
    """A file of JSON objects, one a line.

    A line is written by one system call, so a reader or a killed process never leaves two lines mixed. What a killed
    process wrote of its last line is cut off when the file is opened for the next line.

    Args:
        path: the file; its directory must exist when the first line is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    @property
    def size(self) -> int:
        """The size of the whole lines, in bytes."""
        return whole_bytes(self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Values that JSON lacks become text: ``"nan"``, ``"inf"``, ``"-inf"``, or their ``str``.

        Raises:
            OSError: the line was not written, for example as the disk is full; the file is as it was.
        """
        line = json.dumps(plain_json(record), ensure_ascii=False, separators=(",", ":"), default=str).encode() + b"\n"
        handle = self._opened()
        written = 0
        try:
            written = os.write(handle, line)
            if written < len(line):
                raise OSError(f"{str(self.path)!r}: {written} of {len(line)} bytes were written; the disk may be full.")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise

    def keep(self, num_bytes: int) -> None:
        """Drop the lines after the first ``num_bytes``; no effect on a shorter file."""
        if num_bytes < self.size:
            self.close()
            os.truncate(self.path, num_bytes)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _opened(self) -> int:
        if self._handle is None:
            size = self.size
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.ftruncate(self._handle, size)
        return self._handle


def whole_bytes(path: Path) -> int:
    """Return the size of the whole lines of a file; 0 if there is no file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - _BLOCK_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
    except FileNotFoundError:
        pass
    return 0


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each whole line from byte ``start``: the position of its end, and the object.

    A line that is not a JSON object is skipped, as another program may have changed the file.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield start, record


def plain_json(value: Any) -> Any:
    """Return a value in which numbers that are not finite are text, as JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
