"""``Job``: a script, its arguments and its resources, from which the files of all platforms are written."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from ..framework.core.errors import ConfigurationError

# The name of a pod is derived from that of the job, and may have 63 characters.
_MOST_LETTERS = 40


@dataclass(frozen=True)
class Job:
    """A run of a script on a platform."""

    name: str
    script: str
    arguments: tuple[str, ...]
    nodes: int
    devices: int
    """The number of ranks on each node."""
    max_restarts: int
    gpus: int
    """The number of GPUs of each node, 0 for none."""
    image: str
    """The container image; empty on platforms without containers."""
    directory: str
    """The working directory."""

    def command(self, *options: str, python: str = sys.executable) -> list[str]:
        """Return the command that starts the ranks of one node, with further options before the script."""
        own = ["-n", str(self.devices)]
        if self.max_restarts:
            own += ["--max-restarts", str(self.max_restarts)]
        return [python, "-m", "phalanx", "launch", *own, *options, self.script, *self.arguments]


def job_name(given: str) -> str:
    """Return a name that all platforms accept: lower-case letters, digits and hyphens, a letter first.

    Raises:
        ConfigurationError: no letter is left.
    """
    name = re.sub(r"[^a-z0-9]+", "-", given.lower()).lstrip("-0123456789")[:_MOST_LETTERS].rstrip("-")
    if not name:
        raise ConfigurationError(f"--name {given!r} has no letter: give one of letters, digits and hyphens.")
    return name
