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
from .fork_server_main import NO_RANK, READY, SIGNALS, SPOILED, Preparation, RankRequest

# Packages whose modules the server imports if this process has imported them. None of them reads the rank when it is
# imported, as torchmetrics does: in the server there is no rank yet.
_SHARED = frozenset({"torch", "numpy", __name__.partition(".")[0]})
_ANSWER_SECONDS = 60.0


class ServerGone(Exception):
    """Raised when no rank can be forked. The caller starts the rank as a new interpreter instead.

    The server has ended, has imported a module that prevents forking, or has not answered within 60 s.
    """


class ForkServer:
    """The process that the ranks of ``script`` are forked from; each becomes a child of this process. Linux only.

    This process must have called ``adopt_orphans``.

    Args:
        script: the script that the ranks run.
        environment: the environment variables with which libraries are loaded. Those of any rank will do, as the
            variables that differ between ranks are set after the fork.
        libraries: modules to import besides those of torch, numpy and phalanx that this process has imported.
    """

    def __init__(self, script: Script, environment: Mapping[str, str], libraries: Iterable[str] = ()) -> None:
        # Not socket.socketpair: a script may have set a default timeout for sockets.
        self._connection, server_end = multiprocessing.Pipe()
        try:
            self._process = subprocess.Popen(
                [*script.interpreter, str(Path(fork_server_main.__file__)), script.target, *script.arguments],
                env=environment,
                cwd=script.directory,
                stdin=server_end.fileno(),
                preexec_fn=_child_setup(),
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            server_end.close()
        modules = [name for name in sys.modules if name.partition(".")[0] in _SHARED]
        mask = [int(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        run = script.target, script.is_module, [*script.arguments], script.command
        self._is_ready = False
        self.is_spoiled = False
        """Whether a library has initialized an accelerator, so that no rank can be forked."""
        # If the server has ended already, the pipe is closed. ``fork`` then raises ``ServerGone``, and
        # the caller starts ranks as new interpreters.
        with contextlib.suppress(OSError):
            self._connection.send(tuple(Preparation(os.getpid(), sys.path[:], modules, *run, mask, (*libraries,))))

    @property
    def pid(self) -> int:
        """The process id."""
        pid: int = self._process.pid
        return pid

    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def is_ready_or_ended(self) -> bool:
        """Whether the server has imported everything, or has ended."""
        if not self._is_ready:
            with contextlib.suppress(EOFError, OSError):
                answer = self._connection.recv() if self._connection.poll() else None
                self.is_spoiled = answer == SPOILED
                self._is_ready = answer == READY or self.is_spoiled
        return self._is_ready or not self.is_alive()

    def fork(
        self, environment: Mapping[str, str], streams: tuple[int, int, int], inherited: Mapping[str, int]
    ) -> ForkedProcess:
        """Start a rank.

        Args:
            environment: the environment variables of the rank.
            streams: the file descriptors of its standard input, output and error.
            inherited: maps the name of an environment variable to a file descriptor. The rank gets a duplicate of the
                descriptor, and its number as the value of the variable.

        Returns:
            The rank, a child of this process.

        Raises:
            OSError: the system cannot create another process.
            ServerGone: no rank can be forked; a process with an unknown id may have been forked.
        """
        try:
            self._connection.send(tuple(RankRequest({**environment}, [*inherited])))
            with socket.socket(fileno=os.dup(self._connection.fileno())) as rank_socket:
                rank_socket.settimeout(None)
                sendfds(rank_socket, [*streams, *inherited.values()])
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


def _child_setup() -> Callable[[], None]:
    """Return the function that the new process calls before it runs the server.

    The server then dies with this process, and never handles the signals of ranks: Ctrl-C reaches all processes of the
    terminal. The ranks unblock these signals after the fork.
    """
    arm = die_with_parent()

    def set_up() -> None:
        arm()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    return set_up
