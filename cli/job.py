"""``Job``: a script, its arguments and its resources, from which the files of all platforms are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..framework.core.errors import ConfigurationError

LAUNCHER = ("-m", "phalanx", "launch")
"""Arguments of the interpreter for the launcher of the ranks of one node; its options follow, and the program."""
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

    @property
    def options(self) -> list[str]:
        """The options of the launcher, the same on all nodes."""
        restarts = ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        return ["-n", str(self.devices), *restarts]

    @property
    def program(self) -> list[str]:
        """The script and its arguments."""
        return [self.script, *self.arguments]


def job_name(given: str) -> str:
    """Return a name that all platforms accept: lower-case letters, digits and hyphens, a letter first.

    Raises:
        ConfigurationError: no letter is left.
    """
    name = re.sub(r"[^a-z0-9]+", "-", given.lower()).lstrip("-0123456789")[:_MOST_LETTERS].rstrip("-")
    if not name:
        raise ConfigurationError(f"--name {given!r} has no letter: give one of letters, digits and hyphens.")
    return name
