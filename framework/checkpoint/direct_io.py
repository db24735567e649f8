"""A new file written front to back, past the page cache where the file system lets one.

A checkpoint is synced before it counts. Through the page cache its bytes are copied into pages that have to be found
first, and reach the disk when the sync asks; written directly (``O_DIRECT``) they are on their way at once, and push
out nothing that training reads. That takes whole blocks in aligned memory: buffers of which one is filled while
threads write the others. What a file system refuses, and the end of a file, goes through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from pathlib import Path

from ..system.atomic_files import reserve
from .background_task import Background

_BUFFER_BYTES = 4 << 20
_WRITERS = 2
_NOT_DIRECTLY = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A file that must not be there yet. Every method raises ``OSError`` for what the disk refuses, perhaps late."""

    def __init__(self, path: Path, size: int) -> None:
        """Create it, with room for ``size`` bytes, which need not be all that is written."""
        self.path = path
        self._file = path.open("xb", buffering=0)
        self._writing: deque[Background] = deque()
        self._filled = self._start = 0
        try:
            reserve(self._file.fileno(), size)
            # Anonymous memory begins at a page.
            self._buffers = deque([mmap.mmap(-1, min(_BUFFER_BYTES, max(size, 1)))])
            if size > _BUFFER_BYTES:
                self._buffers.extend(mmap.mmap(-1, _BUFFER_BYTES) for _ in range(_WRITERS))
                self._set_direct(True)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The bytes written so far."""
        return self._start + self._filled

    def write(self, data: memoryview) -> None:
        """Append bytes; they are copied."""
        while len(data):
            buffer = self._buffers[0]
            part = data[: len(buffer) - self._filled]
            buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(buffer):
                self._pass_on()

    def sync(self) -> None:
        """Write what is left, and wait until all is on the disk."""
        self._settle(0)
        self._set_direct(False)
        self._put(memoryview(self._buffers[0])[: self._filled], self._start)
        self._start, self._filled = self.size, 0
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file and of the memory."""
        for work in self._writing:
            work.wait()
        self._file.close()

    def _pass_on(self) -> None:
        data, start = memoryview(self._buffers[0]), self._start
        if len(self._buffers) == 1:
            self._put(data, start)
        else:
            self._writing.append(Background(lambda: self._put(data, start)))
            self._buffers.rotate(-1)
            # The next one is free again when the oldest has been written.
            self._settle(_WRITERS)
        self._start, self._filled = self.size, 0

    def _settle(self, most: int) -> None:
        """Wait until at most so many buffers are being written; an error is raised here."""
        while len(self._writing) > most:
            work = self._writing.popleft()
            work.wait()
            if work.error is not None:
                raise work.error

    def _put(self, data: memoryview, start: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._file.fileno(), data[done:], start + done)
            except OSError as error:
                if error.errno not in _NOT_DIRECTLY or not self._set_direct(False):
                    raise

    def _set_direct(self, wanted: bool) -> bool:
        """Write past the page cache or through it; return whether that was a change."""
        flag = getattr(os, "O_DIRECT", 0)
        try:
            import fcntl

            flags = fcntl.fcntl(self._file.fileno(), fcntl.F_GETFL)
            if bool(flags & flag) == wanted:
                return False
            fcntl.fcntl(self._file.fileno(), fcntl.F_SETFL, flags ^ flag)
        except (ImportError, OSError):
            return False
        return True
