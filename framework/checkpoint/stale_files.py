"""Cleanup after killed processes: hidden directories and files of unfinished writes and deletions."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from ..core.arguments import names_arguments
from ..core.errors import StorageError
from ..system.atomic_directories import remove_tree
from ..system.atomic_files import storage_error, sync_directory
from ..system.file_lock import unheld
from .manifest_file import is_ours

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
