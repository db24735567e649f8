"""``Meeting``: what the ranks that one process starts share, so that they find one another and leave their notes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..system.environment import rank_environment, threads_for_ranks
from ..system.file_lock import lock, unheld, unlock
from ..system.launcher_env import STORE_FD
from ..system.processes import is_running
from .restart_policy import attempt_directory

# Of the directory that the ranks of a launch share; the supervisor's process number follows.
_PREFIX = "phalanx-"


@dataclass(frozen=True)
class Meeting:
    """What the ranks of one attempt share: a private directory, and a socket that listens on loopback alone."""

    directory: str
    listener: socket.socket
    num_ranks: int
    attempt: int = 0
    token: str = field(default_factory=partial(secrets.token_hex, 8))

    def environment(self, rank: int) -> dict[str, str]:
        """Return the whole environment of a rank."""
        return rank_environment(
            rank=rank,
            size=self.num_ranks,
            port=self.listener.getsockname()[1],
            store_fd=self.listener.fileno() if rank == 0 else None,
            error_dir=self.directory,
            threads=threads_for_ranks(self.num_ranks),
            attempt=self.attempt,
            token=self.token,
        )

    def inherited(self, rank: int) -> dict[str, int]:
        """Return the descriptors that a rank is to have, by the variable that holds its number."""
        return {STORE_FD: self.listener.fileno()} if rank == 0 else {}


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """Make the directory in which ranks leave their notes; it is removed at the end."""
    _remove_leftovers(Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    lock(handle)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        unlock(handle)


@contextlib.contextmanager
def meeting(launch_directory: str, num_ranks: int, attempt: int = 0) -> Iterator[Meeting]:
    """Make what the ranks of an attempt share."""
    directory = attempt_directory(launch_directory, attempt)
    os.mkdir(directory)
    # Bound now and handed to rank 0, so that no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(64, 4 * num_ranks))
    try:
        yield Meeting(directory, listener, num_ranks, attempt)
    finally:
        listener.close()


def _remove_leftovers(directory: Path) -> None:
    """Remove what supervisors that were killed have left; each names its process. Never through a link."""
    for path in directory.glob(f"{_PREFIX}[0-9]*-*"):
        process = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not process.isdecimal() or is_running(int(process)):
            continue
        # On another host, or in another container, there may be one of that number: then it is held.
        with contextlib.suppress(OSError), unheld(path) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)
