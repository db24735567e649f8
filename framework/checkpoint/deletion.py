"""Deletion of checkpoints: by the user, on a thread of a fit, and of what killed processes have left.

A checkpoint is renamed to a hidden name before its files are deleted: a process killed at any instant leaves hidden
directories, and never a visible checkpoint that lacks files. Training never waits until the disk has freed the blocks.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..core.arguments import names_arguments
from ..core.errors import StorageError
from ..storage.mirror import after_change, before_deletion, refreshed
from ..system.atomic_directories import delete_hidden, hide_directory, remove_tree
from ..system.atomic_files import free_bytes, storage_error, sync_directory
from ..system.file_lock import unheld
from .manifest import is_ours


@names_arguments
def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: its name disappears at once, then its files. A link is removed, never its target.

    Raises:
        StorageError: the directory holds something that no checkpoint holds, or cannot be deleted.
    """
    place = refreshed(path)
    hidden = hide(place)
    if hidden is not None:
        delete_hidden(hidden)
    after_change(place)


def hide(path: str | os.PathLike[str]) -> Path | None:
    """Rename a checkpoint to a hidden name before deletion; return that name, or None for a link, which is removed.

    Raises:
        StorageError: the directory holds something that no checkpoint holds, or cannot be renamed.
    """
    folder = Path(path)
    if folder.is_symlink():
        folder.unlink()
        return None
    if not is_ours(folder):
        raise StorageError(f"{str(folder)!r} is not a checkpoint or holds other files; it is not deleted.")
    before_deletion(folder)
    return hide_directory(folder)


# More directories wait only if saves are faster than the disk deletes; each still takes the space of a checkpoint.
_MOST_WAITING = 4


class BackgroundDeletion:
    """A queue of hidden directories that a thread deletes in order. The thread ends when the queue is empty.

    A directory gets its hidden name before it enters the queue: a process killed at any instant leaves hidden
    directories, which ``clean_leftovers`` deletes when the run is continued, and never a visible checkpoint that lacks
    files.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Path] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._problems: list[str] = []

    def add(self, hidden: Path) -> None:
        """Add a hidden directory to the queue. Blocks only while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < _MOST_WAITING)
            self._queue.append(hidden)
            if len(self._queue) == 1:
                self._stopped.clear()
                self._thread = threading.Thread(target=self._run, daemon=True, name="phalanx-delete")
                self._thread.start()

    def make_room(self, directory: Path, size: int) -> None:
        """Wait for pending deletions if less than ``size`` bytes are free at ``directory``."""
        if self._queue and (free_bytes(directory) or 0) < size:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all directories are deleted, at most ``seconds``; return whether they are."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float | None = None) -> None:
        """Wait at most ``seconds``, then end the thread after its current file; the rest stays as hidden leftovers."""
        if not self.wait(seconds):
            self._stopped.set()
            self.wait()

    def problems(self) -> list[str]:
        """Return a sentence for each failed deletion since the last call."""
        with self._changed:
            problems, self._problems = self._problems, []
        return problems

    def _run(self) -> None:
        while True:
            problem = ""
            try:
                delete_hidden(self._queue[0], self._stopped.is_set)
            except Exception as error:
                # Nothing may end this thread early: a full queue would wait for it forever.
                problem = f"An old checkpoint was not deleted: {error}"
            with self._changed:
                self._queue.popleft()
                self._problems += [problem] if problem else []
                if self._stopped.is_set():
                    self._queue.clear()
                self._changed.notify_all()
                if not self._queue:
                    return


_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|old|gone)", re.DOTALL)


def clean_own(directory: Path, note: Callable[[str], None]) -> list[Path]:
    """Clean up a directory that only this process writes into, since it holds the run's lock.

    If a leftover cannot be deleted, ``note`` is called with the reason.
    """
    return _clean(directory, lambda name, path: path.is_file() or is_ours(path), False, note)


def clean_shared(directory: Path, written: Callable[[str], bool], note: Callable[[str], None]) -> list[Path]:
    """Clean up a directory that other runs may be writing into concurrently.

    Deletes only leftovers of names that this run writes, by ``written``, and that no live process has locked.
    """
    return _clean(directory, lambda name, path: written(name) and is_ours(path), True, note)


def _clean(directory: Path, ours: Callable[[str, Path], bool], shared: bool, note: Callable[[str], None]) -> list[Path]:
    if directory.is_symlink():
        return []
    try:
        return clean_leftovers(directory, ours, shared)
    except StorageError as error:
        note(f"Leftovers of a killed save were not deleted: {error}")
        return []


@names_arguments
def clean_leftovers(
    directory: str | os.PathLike[str],
    ours: Callable[[str, Path], bool] | None = None,
    shared: bool = False,
) -> list[Path]:
    """Delete leftovers of killed processes in ``directory`` (not in subdirectories); return the deleted paths.

    A ``.old`` directory whose successor is missing is renamed back instead. Links are ignored.

    Args:
        directory: no other process may be writing into it, unless it is ``shared``.
        ours: called with the name that was being written and the path of the leftover; return False to skip it.
        shared: skip leftovers that a live process has locked.

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


def _leftovers(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("listing", folder, error) from error
    matches = ((name, _LEFTOVER.fullmatch(name)) for name in names)
    return [(folder / name, match) for name, match in matches if match is not None]
