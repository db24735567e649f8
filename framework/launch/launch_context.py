"""``LaunchContext``: the private directory and the rendezvous socket that the ranks of one attempt share."""

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

# Prefix of the name of a launch's private directory; the supervisor's pid follows.
_PREFIX = "phalanx-"


@dataclass(frozen=True)
class LaunchContext:
    """A private directory for the records of the ranks, and a socket that listens only on the loopback interface."""

    directory: str
    listener: socket.socket
    num_ranks: int
    attempt: int = 0
    token: str = field(default_factory=partial(secrets.token_hex, 8))

    def environment(self, rank: int) -> dict[str, str]:
        """Return the full environment of a rank."""
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
        """Return the descriptors that a rank inherits, by the environment variable with the descriptor's number."""
        return {STORE_FD: self.listener.fileno()} if rank == 0 else {}


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """Create the directory of a launch; remove it on exit."""
    _remove_stale(Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    lock(handle)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        unlock(handle)


@contextlib.contextmanager
def launch_context(launch_directory: str, num_ranks: int, attempt: int = 0) -> Iterator[LaunchContext]:
    """Create the directory and the socket of an attempt."""
    directory = attempt_directory(launch_directory, attempt)
    os.mkdir(directory)
    # Bound now and inherited by rank 0, so that no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(64, 4 * num_ranks))
    try:
        yield LaunchContext(directory, listener, num_ranks, attempt)
    finally:
        listener.close()


def _remove_stale(directory: Path) -> None:
    """Remove the directories of supervisors that were killed, never through a symbolic link."""
    for path in directory.glob(f"{_PREFIX}[0-9]*-*"):
        process = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not process.isdecimal() or is_running(int(process)):
            continue
        # The process may run on another host, or in another container: then it holds the lock.
        with contextlib.suppress(OSError), unheld(path) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)
