"""Publish, replace and delete directories so that neither a reader nor a crash leaves a partial one visible."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from ..core.errors import StorageError
from .atomic_files import hidden_sibling, make_directory, storage_error, sync_directory
from .file_lock import lock, unlock

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# The kernel or the file system does not support the call: two renames are used instead.
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}


class HiddenDirectory:
    """A new hidden directory beside ``path``, locked until ``release`` so that no other process takes it for stale."""

    def __init__(self, path: Path) -> None:
        """Create the directory, and missing parents.

        Raises:
            OSError: it cannot be created.
        """
        make_directory(path.parent)
        while True:
            self.path = hidden_sibling(path, "tmp")
            # Not synced: its name need not survive a crash, and each sync of a directory waits for the disk.
            self.path.mkdir()
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            # Between the two calls another process may have deleted the directory as a leftover.
            if lock(self._handle) is not False and os.path.lexists(self.path):
                return
            os.close(self._handle)

    def release(self) -> None:
        """Release the lock; the directory stays. Safe to call twice."""
        if self._handle >= 0:
            unlock(self._handle)
            self._handle = -1


def replace_directory(temporary: Path, target: Path, discard: Callable[[Path], None] | None = None) -> None:
    """Publish the finished directory ``temporary`` as its sibling ``target``, replacing an existing one.

    The contents of ``temporary`` must be synced already. Where the system can swap two names in one step (Linux, most
    local file systems), ``target`` is at every instant the old or the new directory. Elsewhere the old one is first
    renamed to a hidden ``.old`` sibling: a process killed right then leaves no ``target``, and ``clean_leftovers``
    renames the old one back.

    Args:
        temporary: the new directory.
        target: its final name.
        discard: deletes the replaced directory by its hidden name. Default: delete it before returning.

    Raises:
        StorageError: the rename failed; the old directory is in place.
    """
    try:
        sync_directory(temporary)
        replaced = _swap_in(temporary, target)
        try:
            sync_directory(target.parent)
        except OSError:
            _swap_back(temporary, target, replaced)
            raise
    except OSError as error:
        raise storage_error("publishing", target, error) from error
    if replaced is not None:
        # A failure leaves a hidden leftover for clean_leftovers; the new directory is published all the same.
        with contextlib.suppress(OSError):
            (discard or delete_hidden)(replaced)


def _swap_in(temporary: Path, target: Path) -> Path | None:
    """Rename ``temporary`` to ``target``; return the hidden name of the replaced directory, if there was one."""
    if not os.path.lexists(target):
        os.rename(temporary, target)
        return None
    if _exchange(temporary, target):
        return temporary
    replaced = hidden_sibling(target, "old")
    os.rename(target, replaced)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(replaced, target)
        raise
    return replaced


def _swap_back(temporary: Path, target: Path, replaced: Path | None) -> None:
    """Undo ``_swap_in``."""
    if replaced == temporary:
        _exchange(temporary, target)
        return
    os.rename(target, temporary)
    if replaced is not None:
        os.rename(replaced, target)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; return False if the system does not support this."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = (os.fsencode(first), os.fsencode(second))
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def hide_directory(path: Path) -> Path:
    """Rename a directory to a hidden ``.gone`` sibling, the first step of deleting it; return the hidden path.

    Readers stop seeing the directory at once. ``delete_hidden`` is the second step; if a crash prevents that,
    ``clean_leftovers`` deletes the sibling when the run is continued.

    Raises:
        StorageError: ``path`` is a link or not a directory, or cannot be renamed.
    """
    hidden = hidden_sibling(path, "gone")
    try:
        _check_directory(path)
        os.rename(path, hidden)
    except OSError as error:
        raise storage_error("deleting", path, error) from error
    return hidden


def delete_hidden(hidden: Path, stopped: Callable[[], bool] = lambda: False) -> None:
    """Delete a directory or link with a hidden name. It is not an error if another process has deleted it.

    ``stopped`` is called before each file; once it returns True the rest stays.

    Raises:
        StorageError: something cannot be deleted.
    """
    try:
        # A crash after the first deleted file must not bring back the old name with a part of its files.
        sync_directory(hidden.parent)
        if not stat.S_ISDIR(hidden.lstat().st_mode):
            hidden.unlink()
            return
        handle = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            # Other processes that clean up skip a locked directory.
            lock(handle)
            # File by file, since freeing the blocks of a large file takes long; everything else is deleted at the end.
            for name in os.listdir(handle):
                if stopped():
                    return
                if not stat.S_ISDIR(os.lstat(name, dir_fd=handle).st_mode):
                    os.unlink(name, dir_fd=handle)
            shutil.rmtree(hidden)
        finally:
            unlock(handle)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error("deleting", hidden, error) from error


def remove_tree(path: Path) -> None:
    """Delete a directory with its contents. Links in it are deleted, never followed; ``path`` may not be one.

    Raises:
        StorageError: ``path`` is a link or not a directory, or something in it cannot be deleted.
    """
    try:
        _check_directory(path)
        shutil.rmtree(path)
    except OSError as error:
        raise storage_error("deleting", path, error) from error


def _check_directory(path: Path) -> None:
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise StorageError(f"{str(path)!r} is a link or a file; only a directory of its own is deleted.")


def link_files(source: Path, target: Path) -> None:
    """Fill the empty directory ``target`` with the files of ``source``, and sync it.

    Uses hard links: files of a checkpoint never change once written, so both directories can share them, and either can
    be deleted. If links are not possible, the files are copied.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        for file in sorted(source.iterdir()):
            _link_or_copy(file, target / file.name)
        sync_directory(target)
    except OSError as error:
        raise storage_error("writing", target, error) from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
