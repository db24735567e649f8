"""The directory of a run: ``root/<name>/version_<n>``, one for each run, held by a lock while it is written."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from pathlib import Path

from ..core.errors import ConfigurationError, StorageError
from .atomic_files import write_text
from .file_lock import lock, unlock

_VERSION = re.compile(r"version_(\d+)$")
LOCK = ".lock"
"""The file that the process holds locked that writes a run."""
IDENTITY = "run.id"
"""The file with a random id of the run."""
CONFIG = "config.json"
"""The file that records how a run was started."""
CONFIGURATION = "config.yaml"
"""The file in which a program with configuration files records its configuration."""
REPORT = "report.json"
"""The file that records how a run ended."""
RANKS = "ranks.json"
"""The file in which the supervisor of a fit in progress records the state of each rank."""


class RunDirectory:
    """One run's directory. Rank 0 alone creates and locks it; nothing is created before ``acquire``."""

    def __init__(self, root: Path, name: str, version: int) -> None:
        self.root = root
        self.name = name
        self.version = version
        self.claimed = False
        self.identity: str | None = None
        """A random id that distinguishes runs that save into the same directory; None before ``acquire``."""
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The directory."""
        return self.root / self.name / f"version_{self.version}"

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"

    def acquire(self, fresh: bool) -> None:
        """Create the directory and hold its lock until ``release``, or until this process ends for any reason.

        With ``fresh``, use the next free version if another run has created the directory in the meantime.

        Raises:
            StorageError: the directory cannot be written, or another process holds its lock (the message names it).
        """
        if self._lock is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while fresh and self.path.exists():
                self.version += 1
            self.path.mkdir(exist_ok=not fresh)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written ({error.strerror}): give another default_root_dir, or free this one."
            ) from None
        if lock(descriptor) is False:
            holder = os.read(descriptor, 4096).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise StorageError(
                f"{self.path} is being written by {holder}: wait for that run, end it, or give another "
                "default_root_dir."
            )
        self.identity = identity_of(self.path)
        if self.identity is None:
            self.identity = secrets.token_hex(8)
            write_text(self.path / IDENTITY, self.identity)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._lock = descriptor

    def adopt(self, version: int, claimed: bool, identity: str | None = None) -> None:
        """Set the version, whether it is claimed, and the run's identity, as another process determined them."""
        self.version, self.claimed = version, claimed
        self.identity = identity or self.identity

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def write_json(self, name: str, document: object) -> None:
        """Write a small document into the directory, which is created again if it was removed.

        Raises:
            StorageError: it cannot be written.
        """
        write_text(self.path / name, json.dumps(document, indent=2, default=str) + "\n")


def directory_at(path: Path) -> RunDirectory:
    """Return the directory of a run, which exists.

    Raises:
        ConfigurationError: it is not one of a Trainer's run.
    """
    place = path.absolute()
    match = _VERSION.fullmatch(place.name)
    if match is None:
        raise ConfigurationError(f"{str(path)!r} is not the directory of a Trainer's run, such as version_3.")
    return RunDirectory(place.parent.parent, place.parent.name, int(match[1]))


def identity_of(path: Path) -> str | None:
    """Return the identity of the run with this directory, or None."""
    try:
        return (path / IDENTITY).read_text(encoding="utf-8") or None
    except (OSError, ValueError):
        return None


def versions(root: Path, name: str) -> list[int]:
    """Return the versions that exist under ``root/name``, ascending."""
    try:
        entries = os.listdir(root / name)
    except OSError:
        return []
    return sorted(int(match.group(1)) for entry in entries if (match := _VERSION.match(entry)))


def next_version(root: Path, name: str) -> int:
    """Return the first version after those that exist."""
    found = versions(root, name)
    return found[-1] + 1 if found else 0
