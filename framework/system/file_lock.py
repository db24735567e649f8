"""Locks of files and directories (``flock``) that end with the process that holds them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def lock(handle: int) -> bool | None:
    """Lock an open file or directory until it is unlocked or this process ends.

    Returns False if another process holds the lock, and None if the file system does not support locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def unlock(handle: int) -> None:
    """Release a lock and close its file or directory."""
    # A process forked meanwhile shares the lock: closing alone would leave the lock with that process.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


@contextlib.contextmanager
def unheld(path: Path) -> Iterator[bool]:
    """Report whether no live process holds the lock of a directory; within the block no process can take it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield lock(handle) is True
    finally:
        os.close(handle)


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock of a file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return lock(handle) is False
    finally:
        # Closing releases what was locked here.
        os.close(handle)
