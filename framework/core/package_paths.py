"""Paths of phalanx's own source files, for separating its stack frames from the user's. Does not import torch."""

from __future__ import annotations

from pathlib import Path

PACKAGE_ROOT = Path(__file__).absolute().parents[2]
_FOLDERS = ("framework", "strategies", "callbacks", "loggers", "cli")

# The package may have been imported through a link. Tests and examples beside the folders count as user code.
OWN_FOLDERS = tuple(f"{root / folder}/" for root in {PACKAGE_ROOT, PACKAGE_ROOT.resolve()} for folder in _FOLDERS)


def folder_of(room: str) -> str:
    """Return the path of a sub-package of ``framework``, with a trailing slash."""
    folder = PACKAGE_ROOT / "framework" / room
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    return f"{folder}/"
