"""``ForkServer``: a process that imports the modules of every rank once, and from which the ranks are forked.

Importing torch and the modules of an optimizer takes seconds of CPU time per rank; a fork takes milliseconds. So all
ranks of a machine cost one import, and restarted ranks cost none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.reduction import sendfds
from pathlib import Path

from ..system.entry_script import Script
from ..system.processes import ForkedProcess, die_with_parent
from . import fork_server_main
from .fork_server_main import NO_RANK, READY, SIGNALS, Preparation, RankRequest

# Packages whose modules the server imports if this process has imported them. None of them reads the rank when it is
# imported, as torchmetrics does: in the server there is no rank yet.
_SHARED = frozenset({"torch", "numpy", __name__.partition(".")[0]})
_ANSWER_SECONDS = 60.0


class ServerGone(Exception):
    """Raised when no rank can be forked: the server has ended, or has imported a module that prevents forking."""


class ForkServer:
    """The process that the ranks of ``script`` are forked from; each becomes a child of this process. Linux only.

    This process must have called ``adopt_orphans``.

    Args:
        script: the script that the ranks run.
        environment: the environment variables for loading libraries: those of any of the ranks.
        libraries: modules to import besides those of torch, numpy and phalanx that this process has imported.
    """

    def __init__(self, script: Script, environment: Mapping[str, str], libraries: Iterable[str] = ()) -> None:
        # Not socket.socketpair: a script may have set a default timeout for sockets.
        self._connection, theirs = multiprocessing.Pipe()
        try:
            self._process = subprocess.Popen(
                [*script.interpreter, str(Path(fork_server_main.__file__)), script.target, *script.arguments],
                env=environment,
                stdin=theirs.fileno(),
                preexec_fn=_prepared(),
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        modules = [name for name in sys.modules if name.partition(".")[0] in _SHARED]
        mask = [int(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        run = script.target, script.is_module, [*script.arguments], script.command
        self._is_ready = False
        with contextlib.suppress(OSError):
            self._connection.send(tuple(Preparation(os.getpid(), sys.path[:], [*modules, *libraries], *run, mask)))

    @property
    def pid(self) -> int:
        """The process id."""
        pid: int = self._process.pid
        return pid

    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def has_settled(self) -> bool:
        """Whether it has imported everything, or ended during an import."""
        if not self._is_ready:
            with contextlib.suppress(EOFError, OSError):
                self._is_ready = self._connection.poll() and self._connection.recv() == READY
        return self._is_ready or not self.is_alive()

    def fork(
        self, environment: Mapping[str, str], stdout: int, stderr: int, inherited: Mapping[str, int]
    ) -> ForkedProcess:
        """Start a rank, and return it. ``inherited`` names the environment variables for the numbers of descriptors.

        Raises:
            OSError: the system cannot create another process.
            ServerGone: no rank can be forked; a process with an unknown id may have been forked.
        """
        try:
            self._connection.send(tuple(RankRequest({**environment}, [*inherited])))
            with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                line.settimeout(None)
                sendfds(line, [stdout, stderr, *inherited.values()])
            if not self._connection.poll(_ANSWER_SECONDS):
                raise ServerGone
            answer: int | OSError = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ServerGone from error
        if isinstance(answer, OSError):
            raise answer
        if answer == NO_RANK:
            raise ServerGone
        return ForkedProcess(answer)

    def close(self) -> None:
        """End the process; the ranks continue."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _prepared() -> Callable[[], None]:
    """Return the function that the server's process calls first: it blocks signals that are meant for ranks."""
    arm = die_with_parent()

    def prepare() -> None:
        arm()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    return prepare
