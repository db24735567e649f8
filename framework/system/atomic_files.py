"""Atomic, durable writes of files: after a crash at any instant a file is either complete or unchanged.

Everything is written under a hidden name beside its target, ``.<name>.<16 hex digits>.<kind>``, synced, and renamed.
Only names of this form are ever deleted as leftovers of a killed process, so a user's own files are safe:

    .tmp    an unfinished write, or the directory that it has just replaced
    .old    the previous directory, where two names cannot be swapped in one step; restored if its successor is missing
    .gone   a directory that is being deleted
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import ConfigurationError, StorageError
from ..core.size_text import size_text

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SYNC_FILE_RANGE_WRITE = 2


def storage_error(action: str, path: Path, error: OSError, needed_bytes: int | None = None) -> StorageError:
    """Build the ``StorageError`` of an ``OSError`` raised while ``action`` was applied to ``path``."""
    if isinstance(error, StorageError):
        return error
    text = f"{action} {str(path)!r} failed: {error.strerror or error}."
    if error.errno in _NO_ROOM:
        needed = "" if needed_bytes is None else f"{size_text(needed_bytes)} are needed, "
        free = free_bytes(path)
        available = "too few are" if free is None else f"{size_text(free)} are"
        text += f" {needed}{available} free; make room or choose another directory."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        text += " The directory must be writable by this user; change its permissions or choose another."
    elif error.errno == errno.ENOENT:
        text += " Every rank must see the same directory; on several nodes it has to be on a shared file system."
    built = StorageError(text)
    # Setting the filename as well would make OSError show code and path instead of the sentence.
    built.errno = error.errno
    return built


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write at ``path``, which need not exist yet; None if unknown."""
    for existing in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return None


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path with ``~`` and ``..`` replaced; links are not followed.

    Raises:
        ConfigurationError: it is a URL.
    """
    refuse_url(path)
    return Path(os.path.abspath(os.path.expanduser(path)))


def hidden_sibling(path: Path, kind: str) -> Path:
    """Return a new hidden name beside ``path``; ``kind`` is ``"tmp"``, ``"old"`` or ``"gone"``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def refuse_existing(path: str | os.PathLike[str]) -> None:
    """Raise a ``ConfigurationError`` if something has this name, a broken link included, or if it is a URL."""
    refuse_url(path)
    if os.path.lexists(path):
        raise ConfigurationError(f"{os.fspath(path)!r} exists; choose another name or remove it first.")


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise a ``ConfigurationError`` if a path is a URL."""
    if "://" in (given := os.fspath(path)):
        raise ConfigurationError(f"{given!r} is a URL, and this is written to a local path: give one, and upload it.")


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, durably."""
    missing = [level for level in (path, *path.parents) if not level.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for level in missing:
        sync_directory(level.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename is on the disk only after this."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically and durably, creating its directory if it is missing.

    Raises:
        StorageError: the file cannot be written; the previous one, if any, is untouched.
    """
    with new_file(path, needed_bytes=len(data)) as temporary:
        write_synced(temporary, data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically and durably. Raises as ``write_bytes``."""
    write_bytes(path, text.encode("utf-8"))


def reserve(handle: int, size: int) -> None:
    """Allocate the blocks of a new file of ``size`` bytes in advance, if the file system supports it; this makes
    writing faster.

    Raises:
        OSError: there is not enough room.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    # Not os.posix_fallocate: where the file system has no such call, that function writes into every block instead.
    if fallocate is None or not size:
        return
    if fallocate(handle, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) != 0:
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))


def begin_sync(handle: int, start: int, size: int) -> None:
    """Have the kernel begin to write a range of a file to the disk, and return at once.

    Only a hint, so errors are ignored: ``fsync`` afterwards makes the file durable and reports what failed.
    """
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(handle, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def write_synced(path: Path, data: bytes) -> None:
    """Create a new file with ``data`` and sync it; for files in a directory that is not published yet."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], needed_bytes: int | None = None) -> Iterator[Path]:
    """Yield a temporary path to create and sync; it becomes ``path`` if the block succeeds, and is removed otherwise.

    Raises:
        StorageError: an ``OSError`` in the block or while publishing.
    """
    target = Path(path)
    temporary = hidden_sibling(target, "tmp")
    try:
        make_directory(target.parent)
        yield temporary
        os.replace(temporary, target)
        sync_directory(target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error("writing", target, error, needed_bytes) from error
        raise
