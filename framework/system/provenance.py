"""Origin of a run: versions, the commit, the command and the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..core.accelerators import num_devices
from .environment import hiding_secrets, starting_command, usable_cores
from .redaction import without_secret_options

_PACKAGE = __name__.partition(".")[0]
# Reading the commit of a repository takes milliseconds, unless its disk does not answer.
_GIT_SECONDS = 2.0


def provenance() -> dict[str, Any]:
    """Return the versions, the commit of the script's repository, the command and the machine as JSON values."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    folder = script.absolute().parent if script.is_file() else Path.cwd()
    return {
        "versions": {
            "phalanx": str(vars(sys.modules[_PACKAGE])["__version__"]),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "git_commit": git_commit(folder),
        "git_dirty": has_changes(folder),
        "command": own_command(),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
    }


@cache
def own_version() -> str:
    """Return the version of the installed phalanx, ``"unknown"`` if it is not installed; parses a file once."""
    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "unknown"


def own_command() -> str:
    """Return the command that started this process, without the values of secret variables and options."""
    return hiding_secrets()(without_secret_options(starting_command()))


def git_commit(directory: Path) -> str | None:
    """Return the commit that is checked out in the repository of a directory; None if there is none, or no git."""
    return _git(directory, "rev-parse", "HEAD") or None


def has_changes(directory: Path) -> bool | None:
    """Return whether files that git tracks differ from the commit; None if there is no repository, or no git."""
    # Without the search for untracked files it takes milliseconds.
    found = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return None if found is None else bool(found)


def code_digest(file: Path) -> str:
    """Return a digest of a file, of the commit that is checked out around it, and of the changes since.

    Files that git does not track are left out, but for ``file`` itself.
    """
    folder = file.absolute().parent
    parts = [git_commit(folder) or "", _git(folder, "diff", "HEAD") or ""]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape") + file.read_bytes()).hexdigest()[:16]


def machine_facts(device_type: str) -> dict[str, Any]:
    """Return the processors, the memory in bytes and the system of this machine, and its devices of a type."""
    return {
        "system": platform.platform(terse=True),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "devices": [_device(device_type, index) for index in range(num_devices(device_type))],
    }


def _device(device_type: str, index: int) -> dict[str, Any]:
    properties = getattr(torch.get_device_module(device_type), "get_device_properties", None)
    if properties is None:
        return {"name": device_type, "memory_bytes": None}
    found = properties(index)
    return {"name": found.name, "memory_bytes": found.total_memory}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments],
            cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
