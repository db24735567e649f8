"""What killed saves left behind, deleted at the next start: only what is ours, never through a link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..core.errors import StorageError
from ..system.atomic_files import clean_leftovers
from .manifest_file import is_ours


def clean_own(directory: Path, note: Callable[[str], None]) -> list[Path]:
    """Clean up a directory that this process alone writes into: it holds the run's lock.

    What cannot be deleted stays, and ``note`` is told.
    """
    return _clean(directory, lambda name, path: path.is_file() or is_ours(path), False, note)


def clean_shared(directory: Path, written: Callable[[str], bool], note: Callable[[str], None]) -> list[Path]:
    """Clean up a directory that other runs may be writing into at this moment.

    Only leftovers of names that ``written`` says this run writes, and that no live process holds.
    """
    return _clean(directory, lambda name, path: written(name) and is_ours(path), True, note)


def _clean(directory: Path, ours: Callable[[str, Path], bool], shared: bool, note: Callable[[str], None]) -> list[Path]:
    if directory.is_symlink():
        return []
    try:
        return clean_leftovers(directory, ours, shared)
    except StorageError as error:
        note(f"What a killed save left stays: {error}")
        return []
