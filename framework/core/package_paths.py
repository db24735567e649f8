"""Where the files of phalanx lie, for code that tells its own stack frames from those of a user. Needs no torch."""

from __future__ import annotations

from pathlib import Path

PACKAGE_ROOT = Path(__file__).absolute().parents[1]
_FOLDERS = ("framework", "strategies", "callbacks", "loggers", "cli")

# The package may have been imported through a link. Tests and examples beside the folders are a user's code.
OWN_FOLDERS = tuple(f"{root / folder}/" for root in {PACKAGE_ROOT, PACKAGE_ROOT.resolve()} for folder in _FOLDERS)
