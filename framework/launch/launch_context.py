"""``LaunchContext``: the private directory and the place of the rendezvous that the ranks of one attempt share."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..system.environment import rank_environment, threads_for_ranks
from ..system.file_lock import lock, unheld, unlock
from ..system.launcher_env import LOOPBACK, STORE_FD, Placement
from ..system.processes import is_running
from .restart_policy import attempt_directory, memory_link

# Prefix of the name of a launch's private directory; the supervisor's pid follows.
_PREFIX = "phalanx-"
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class NodeOptions:
    """The nodes of a run, as the launcher of one of them is told."""

    number: int
    """The number of this node, from 0."""
    least: int
    """The number of nodes below which the run ends."""
    most: int
    """The number of nodes that take part if all are there."""
    spares: int
    """The number of nodes beyond that, which wait until one is lost."""
    host: str
    """The name or address of node 0, as all nodes know it."""
    port: int
    """A free port there."""

    @property
    def may_change(self) -> bool:
        """Whether the run may go on with other nodes after the loss of one."""
        return self.least < self.most or self.spares > 0


@dataclass(frozen=True)
class NodeName:
    """The number that a node was given, and its host."""

    number: int
    host: str

    @property
    def address(self) -> str:
        """The name by which torch sorts the nodes of a round, and so assigns their ranks; another for each launcher."""
        return f"{self.number:06} {self.host} {os.getpid()}"

    @classmethod
    def read(cls, address: str) -> NodeName:
        number, host, _ = address.split(" ")
        return cls(int(number), host)

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


@dataclass(frozen=True)
class NodePlace:
    """A node of a run on several nodes, and the address of the store in which all of them meet."""

    rank: int
    count: int
    host: str
    port: int
    token: str = ""
    """A value that differs between attempts, and is the same on all nodes."""
    may_change: bool = False
    """Whether the number of nodes may be another one in the next attempt."""


@dataclass(frozen=True)
class LaunchContext:
    """A private directory for the records of the ranks, and the place of their rendezvous.

    On one node that is a socket that listens only on the loopback interface, and that rank 0 inherits.
    """

    directory: str
    listener: socket.socket | None
    num_ranks: int
    """The number of ranks on this node."""
    attempt: int = 0
    restarts: bool = False
    """Whether ranks that fail are started again."""
    node: NodePlace = field(default_factory=lambda: NodePlace(0, 1, LOOPBACK, 0, secrets.token_hex(8)))

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node.rank * self.num_ranks, (self.node.rank + 1) * self.num_ranks)

    def environment(self, rank: int) -> dict[str, str]:
        place = Placement(
            rank=rank,
            size=self.num_ranks * self.node.count,
            local_rank=rank - self.ranks.start,
            local_size=self.num_ranks,
            node_rank=self.node.rank,
            num_nodes=self.node.count,
            master_addr=self.node.host,
            master_port=self.listener.getsockname()[1] if self.listener else self.node.port,
            run=self.node.token,
        )
        store_fd = self.inherited(rank).get(STORE_FD)
        threads = threads_for_ranks(self.num_ranks)
        changes = self.node.may_change
        return rank_environment(place, store_fd, self.directory, threads, self.attempt, changes, self.restarts)

    def inherited(self, rank: int) -> dict[str, int]:
        """Return the descriptors that a rank inherits, by the environment variable with the descriptor's number."""
        return {STORE_FD: self.listener.fileno()} if rank == 0 and self.listener else {}

    def close_listener(self) -> None:
        """Close this process's copy of the socket, once rank 0 has inherited it."""
        if self.listener is not None:
            self.listener.close()


@contextlib.contextmanager
def private_directory(parent: Path | None = None) -> Iterator[str]:
    """Create the directory of a launch, in that of temporary files if no other is given; remove it on exit."""
    _remove_stale(parent or Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    lock(handle)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        unlock(handle)


@contextlib.contextmanager
def shared_memory(launch_directory: str) -> Iterator[None]:
    """Give a launch a directory in memory that outlives its ranks, see ``open_memory``; remove it on exit.

    There is none on systems that have no file system in memory.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory = stack.enter_context(private_directory(_MEMORY))
            os.symlink(directory, memory_link(launch_directory))
        yield


@contextlib.contextmanager
def launch_context(
    launch_directory: str, num_ranks: int, attempt: int = 0, restarts: bool = False, node: NodePlace | None = None
) -> Iterator[LaunchContext]:
    """Create the directory of an attempt, and its socket unless ``node`` is one of several."""
    directory = attempt_directory(launch_directory, attempt)
    os.mkdir(directory)
    if node is not None:
        yield LaunchContext(directory, None, num_ranks, attempt, restarts, node)
        return
    # Bound now and inherited by rank 0, so that no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(64, 4 * num_ranks))
    try:
        yield LaunchContext(directory, listener, num_ranks, attempt, restarts)
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
