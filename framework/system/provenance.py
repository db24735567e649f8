"""Origin of a run: versions, the commit, the command and the machine."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .environment import hiding_secrets

_PACKAGE = __name__.partition(".")[0]
# Reading the commit of a repository takes milliseconds, unless its disk does not answer.
_GIT_SECONDS = 2.0


def provenance() -> dict[str, Any]:
    """Return the versions, the commit of the script's repository, the command, the folder and the host as JSON values.

    Values of secret variables are left out of the command.
    """
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    return {
        "versions": {
            "phalanx": str(vars(sys.modules[_PACKAGE])["__version__"]),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "git_commit": git_commit(script.absolute().parent if script.is_file() else Path.cwd()),
        "command": hiding_secrets()(shlex.join([sys.executable, *sys.orig_argv[1:]])),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
    }


def git_commit(directory: Path) -> str | None:
    """Return the commit that is checked out in the repository of a directory; None if there is none, or no git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
