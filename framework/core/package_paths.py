"""Paths of phalanx's own source files, for separating its stack frames from the user's. Does not import torch."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        # It was deleted.
        return None


_IMPORTED = os.getpid(), _working_directory()
PACKAGE_ROOT = Path(__file__).absolute().parents[2]
_FOLDERS = ("framework", "strategies", "callbacks", "loggers", "cli")

# The package may have been imported through a link. Tests and examples beside the folders count as user code.
OWN_FOLDERS = tuple(f"{root / folder}/" for root in {PACKAGE_ROOT, PACKAGE_ROOT.resolve()} for folder in _FOLDERS)


def first_directory() -> str | None:
    """Return the working directory when this process imported phalanx; None if it is not known."""
    process, directory = _IMPORTED
    return directory if process == os.getpid() else None


def folder_of(room: str) -> str:
    """Return the path of a sub-package of ``framework``, with a trailing slash."""
    folder = PACKAGE_ROOT / "framework" / room
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    return f"{folder}/"


def warn_if_clone_hides_package() -> None:
    """Warn if this is a clone that Python found before the installed package.

    The root of the repository is the package, so a program beside a clone called ``phalanx`` imports the clone.
    """
    if not (PACKAGE_ROOT / "pyproject.toml").is_file():
        return
    parent = os.path.realpath(PACKAGE_ROOT.parent)
    if parent not in map(os.path.realpath, sys.path):
        # An editable installation, which refers to the clone.
        return
    for folder in map(Path, sys.path):
        if (folder / PACKAGE_ROOT.name / "py.typed").is_file() and os.path.realpath(folder) != parent:
            warnings.warn(
                f"phalanx was imported from the clone {str(PACKAGE_ROOT)!r}, which hides the package installed in "
                f"{str(folder)!r}: rename the folder of the clone, or start the program in another folder.",
                stacklevel=3,
            )
            return
