"""Ranges of a checkpoint's files that are in the bucket and not in the cache, and their download."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import CheckpointError, StorageError
from ..system.atomic_files import hidden_sibling
from .cached_folder import checkpoint_state
from .cached_url import url_of
from .store import Store, open_store

# One request for as many bytes. Readers ask for 1 MiB at a time, and a request takes tens of milliseconds.
_BLOCK_BYTES = 16 * 2**20
# A checkpoint is not downloaded to a disk that it would fill.
_SPARE_BYTES = 2**30


class RemoteFile:
    """A file of a checkpoint, read by ranges."""

    def __init__(self, path: Path, store: Store, name: str, size: int) -> None:
        self.path = path
        self.size = size
        self._store = store
        self._name = name
        self._block = b""
        self._begin = 0

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill ``memory`` with the bytes beginning at ``start``.

        Raises:
            CheckpointError: the file is too short or cannot be read.
        """
        done = 0
        while done < len(memory):
            at = start + done
            if not self._begin <= at < self._begin + len(self._block):
                self._fetch(at, max(_BLOCK_BYTES, len(memory) - done))
            piece = self._block[at - self._begin : at - self._begin + len(memory) - done]
            if not piece:
                raise CheckpointError(f"{str(self.path)!r} ends at byte {at}; the checkpoint is damaged.")
            memory[done : done + len(piece)] = piece
            done += len(piece)

    def read(self, size: int, start: int = 0) -> bytes:
        """Return ``size`` bytes, beginning at ``start``. Raises as ``read_into``."""
        data = bytearray(size)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def _fetch(self, start: int, size: int) -> None:
        try:
            self._block = self._store.read(self._name, start, min(start + size, self.size))
        except OSError as error:
            raise CheckpointError(f"{str(self.path)!r} cannot be read: {error}") from error
        self._begin = start


def remote_file(path: Path) -> RemoteFile | None:
    """Return a tensor file of a checkpoint that is in the bucket alone; None if it is not.

    Raises:
        CheckpointError: the service does not answer.
    """
    if (found := _object_of(path)) is None:
        return None
    store, name = found
    try:
        known = store.version(name)
    except StorageError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    return None if known is None else RemoteFile(path, store, name, known[1])


def download_file(path: Path) -> None:
    """Download a tensor file of a checkpoint into the cache, if it is in the bucket alone and the disk has room."""
    with whole_file(path) as temporary, contextlib.suppress(OSError):
        if temporary is not None:
            temporary.replace(path)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path | None]:
    """Yield a copy of a tensor file that is in the bucket alone, which is deleted afterwards; None if there is none."""
    temporary: Path | None = None
    try:
        # What fails here is read from the bucket, or says why it cannot be.
        with contextlib.suppress(OSError):
            temporary = _downloaded(path)
        yield temporary
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _downloaded(path: Path) -> Path | None:
    if path.exists() or (found := _object_of(path)) is None:
        return None
    store, name = found
    known = store.version(name)
    if known is None or shutil.disk_usage(path.parent).free < known[1] + _SPARE_BYTES:
        return None
    # Beside the checkpoint: in it, a reader would find a file that no checkpoint has.
    temporary = hidden_sibling(path.parent.with_name(path.name), "tmp")
    try:
        store.download(name, temporary)
        is_whole = temporary.stat().st_size == known[1]
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not is_whole:
        temporary.unlink(missing_ok=True)
    return temporary if is_whole else None


def _object_of(path: Path) -> tuple[Store, str] | None:
    """Return the store of the directory of a checkpoint, and the name of one of its files."""
    if (url := url_of(path.parent)) is None:
        return None
    checksum = checkpoint_state(path.parent)
    return (open_store(url), f"{checksum}/{path.name}") if checksum else None
