"""The one home of atomic writing: a file or directory is there whole, or as it was before.

Everything is written to a hidden sibling ``.<name>.<16 hex digits>.tmp``, synced, and renamed. What a killed process
leaves behind has such a name, so that ``clean_leftovers`` can tell it from anything of the user's:

    .tmp    a write that was not finished, or what it had just replaced
    .old    the previous directory, on file systems that cannot swap two names; put back if its successor is missing
    .gone   a directory that was being deleted
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import StorageError

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|old|gone)", re.DOTALL)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The kernel or file system does not know the call; two renames do the work instead.
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}


def storage_error(
    action: str, path: Path, error: OSError, needed_bytes: int | None = None, rank: int | None = None
) -> StorageError:
    """Build the ``StorageError`` for an ``OSError`` met while ``action`` was done to ``path``."""
    if isinstance(error, StorageError):
        return error
    where = "" if rank is None else f"rank {rank}: "
    text = f"{where}{action} {str(path)!r} failed: {error.strerror or error}."
    if error.errno in _NO_ROOM:
        needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes are needed, "
        text += f" {needed}{_free_bytes(path)} free; make room or choose another directory."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        text += " The directory must be writable by this user; change its permissions or choose another."
    elif error.errno == errno.ENOENT:
        text += " Every rank must see the same directory; on several nodes it has to be on a shared file system."
    built = StorageError(text)
    # Not the filename: OSError would show the pair instead of the sentence.
    built.errno = error.errno
    return built


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path from the root, its ``~`` and ``..`` replaced, and no link followed."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _free_bytes(path: Path) -> str:
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(place).free:,} are"
    return "too few are"


def hidden_sibling(path: Path, kind: str) -> Path:
    """Return a fresh hidden name beside ``path``; ``kind`` is ``"tmp"``, ``"old"`` or ``"gone"``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def lock(handle: int) -> bool | None:
    """Take the lock of an open file or directory; it ends with this process, however that ends.

    Returns False where another process holds it, and None where this file system knows no such lock.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def unlock(handle: int) -> None:
    """Let a lock go, and close what it was taken of."""
    # A process forked meanwhile shares the lock: closing alone would leave it with that one.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


class HiddenDirectory:
    """A fresh hidden directory beside ``path``, held until ``release``: nobody takes it for a killed process's."""

    def __init__(self, path: Path) -> None:
        """Make it, and its parents where they are missing.

        Raises:
            OSError: it cannot be made.
        """
        make_directory(path.parent)
        while True:
            self.path = hidden_sibling(path, "tmp")
            # Not synced: its name need not outlive a crash, and each sync of a directory waits for the disk.
            self.path.mkdir()
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            # Between the two calls another process may have taken it for a leftover, and deleted it.
            if lock(self._handle) is not False and os.path.lexists(self.path):
                return
            os.close(self._handle)

    def release(self) -> None:
        """Let go of it; it stays. Safe to be called twice."""
        if self._handle >= 0:
            unlock(self._handle)
            self._handle = -1


def make_directory(path: Path) -> None:
    """Create a directory and its parents where they are missing, durably."""
    missing = [level for level in (path, *path.parents) if not level.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for level in missing:
        sync_directory(level.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically and durably, making its directory where it is missing.

    Raises:
        StorageError: the file cannot be written; the previous one, if any, is untouched.
    """
    with new_file(path, needed_bytes=len(data)) as temporary:
        write_synced(temporary, data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8, as given) atomically and durably. Raises as ``write_bytes``."""
    write_bytes(path, text.encode("utf-8"))


def reserve(handle: int, size: int) -> None:
    """Take the room for a new file of ``size`` bytes ahead, where the file system can; it is then written faster.

    Raises:
        OSError: there is not so much room.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    # Not os.posix_fallocate: where the file system cannot, that one writes into every block instead.
    if fallocate is None or not size:
        return
    if fallocate(handle, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) != 0:
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))


def write_synced(path: Path, data: bytes) -> None:
    """Create a new file with ``data`` and sync it; for files inside a directory that is not yet published."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], needed_bytes: int | None = None) -> Iterator[Path]:
    """Give a temporary path to create and sync; it becomes ``path`` when the block ends well, else it is removed.

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


def replace_directory(temporary: Path, target: Path) -> None:
    """Publish the finished directory ``temporary`` as its sibling ``target``, replacing what is there.

    The contents of ``temporary`` must be synced already. Where the system can swap two names in one step (Linux, most
    local file systems), ``target`` is at every instant the old or the new directory. Elsewhere the old one is first
    renamed to a hidden ``.old`` sibling: a process killed right then leaves no ``target``, and ``clean_leftovers``
    renames the old one back. The old directory is deleted last; killed before that, it stays as a hidden sibling.

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
        _discard(replaced)


def _swap_in(temporary: Path, target: Path) -> Path | None:
    """Rename ``temporary`` to ``target`` and return where the replaced one lies now, if there was one."""
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
    """Swap two names in one step; False where the system cannot."""
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


def _discard(path: Path) -> None:
    """Delete what has a hidden name already. A failure leaves a leftover, and costs nobody a checkpoint."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            remove_tree(path)
        else:
            path.unlink()


def remove_tree(path: Path) -> None:
    """Delete a directory and all in it. Links in it are deleted, never followed; ``path`` may not be one.

    Raises:
        StorageError: ``path`` is a link or no directory, or something in it cannot be deleted.
    """
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise StorageError(f"{str(path)!r} is a link or a file; only a directory of its own is deleted.")
        shutil.rmtree(path)
    except OSError as error:
        raise storage_error("deleting", path, error) from error


def retire_directory(path: Path) -> None:
    """Delete a directory so that its name disappears first and at once. Raises as ``remove_tree``."""
    hidden = hidden_sibling(path, "gone")
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise StorageError(f"{str(path)!r} is a link or a file; only a directory of its own is deleted.")
        os.rename(path, hidden)
        sync_directory(path.parent)
    except OSError as error:
        raise storage_error("deleting", path, error) from error
    remove_tree(hidden)


def clean_leftovers(
    directory: str | os.PathLike[str],
    ours: Callable[[str, Path], bool] | None = None,
    shared: bool = False,
) -> list[Path]:
    """Delete what killed writes left in ``directory`` (not below it) and return the deleted paths.

    A ``.old`` directory whose successor is missing is renamed back instead. Links are left alone. Where ``ours`` is
    given, it is asked with the name that was being written and the leftover, and decides whether that is touched. No
    other process may be writing into the directory, unless it is ``shared``: then what a live process holds stays.

    Raises:
        StorageError: the directory cannot be listed, or a leftover cannot be deleted.
    """
    folder = Path(directory)
    removed: list[Path] = []
    for path, match in _leftovers(folder):
        # Another process may be cleaning up as well.
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) or (ours is not None and not ours(match["name"], path)):
                continue
            if stat.S_ISREG(mode):
                path.unlink()
                removed.append(path)
            elif stat.S_ISDIR(mode):
                with unheld(path) if shared else contextlib.nullcontext(True) as free:
                    if free and match["kind"] == "old" and not os.path.lexists(folder / match["name"]):
                        _put_back(path, folder / match["name"])
                    elif free:
                        remove_tree(path)
                        removed.append(path)
    return removed


def _put_back(path: Path, target: Path) -> None:
    try:
        os.rename(path, target)
        sync_directory(target.parent)
    except OSError as error:
        raise storage_error("putting back", target, error) from error


@contextlib.contextmanager
def unheld(path: Path) -> Iterator[bool]:
    """Say whether no live process holds a directory by its lock, and let none take that in the block."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield lock(handle) is True
    finally:
        os.close(handle)


def _leftovers(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("listing", folder, error) from error
    matches = ((name, _LEFTOVER.fullmatch(name)) for name in names)
    return [(folder / name, match) for name, match in matches if match is not None]
