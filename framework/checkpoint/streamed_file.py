"""A new file that is written sequentially, and flushed to disk while later data is still being produced."""

from __future__ import annotations

import os
from pathlib import Path

from ..system.atomic_files import begin_sync, reserve

# Small enough that little is left for the final sync, large enough for long writes to the disk.
_SYNC_BYTES = 8 << 20


class StreamedFile:
    """A new file, which must not exist yet. Every method raises ``OSError`` if the operation fails.

    A checkpoint is valid only once it is synced. By default the page cache holds its bytes until that sync, which then
    waits for all of them. Here the kernel is asked after every few megabytes to start writing them, so the disk works
    while the next tensors are hashed, and the final sync is short. Direct writes (``O_DIRECT``) take two to three times
    as long on the file systems measured, since each waits for the previous one.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Create the file and reserve ``size`` bytes; more or less may be written."""
        self.path = path
        self.size = 0
        """The bytes written so far."""
        self._begun = 0
        self._file = path.open("xb", buffering=0)
        try:
            reserve(self._file.fileno(), size)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        while len(data):
            # The kernel may write fewer bytes than requested.
            written = os.write(self._file.fileno(), data)
            self.size += written
            data = data[written:]
        if self.size - self._begun >= _SYNC_BYTES:
            begin_sync(self._file.fileno(), self._begun, self.size - self._begun)
            self._begun = self.size

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
