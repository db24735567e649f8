"""``ForkServer``: a process that has imported what every rank needs, once, and from which the ranks are forked.

Importing torch and what an optimizer needs takes a rank seconds of computing; forking takes milliseconds. So all ranks
of a machine cost one import, and ranks that are started again cost none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds
from pathlib import Path

from . import fork_server_main
from .fork_server_main import Preparation, Rank
from .process import ForkedProcess, die_with_parent
from .script import Script

# Packages whose modules, where this process has imported them, ranks get ready made.
_SHARED = frozenset({"torch", "numpy", "torchmetrics", "lightning_utilities", __name__.partition(".")[0]})


class ForkServer:
    """The process that the ranks of ``script`` are forked from; each becomes a child of this process. Linux only.

    This process must have called ``adopt_orphans``.

    Args:
        script: what the ranks run.
        environment: the variables with which libraries are loaded: those of any of the ranks.
        libraries: modules to import besides those of torch, phalanx and their like that this process has imported.
    """

    def __init__(self, script: Script, environment: Mapping[str, str], libraries: Iterable[str] = ()) -> None:
        self._script = script
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        try:
            self._process = subprocess.Popen(
                [*script.interpreter, str(Path(fork_server_main.__file__)), script.target, *script.arguments],
                env=environment,
                stdin=theirs.fileno(),
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        modules = [name for name in sys.modules if name.partition(".")[0] in _SHARED]
        self._is_ready = False
        with contextlib.suppress(OSError):
            self._connection.send(tuple(Preparation(os.getpid(), sys.path[:], [*modules, *libraries])))

    @property
    def pid(self) -> int:
        """Its process number."""
        pid: int = self._process.pid
        return pid

    def is_alive(self) -> bool:
        """Whether ranks can be forked from it."""
        return self._process.poll() is None

    def has_settled(self) -> bool:
        """Whether it has imported everything, or died of it."""
        if not self._is_ready:
            with contextlib.suppress(EOFError, OSError):
                self._is_ready = self._connection.poll() and self._connection.recv() is not None
        return self._is_ready or not self.is_alive()

    def fork(
        self, environment: Mapping[str, str], stdout: int, stderr: int, inherited: Mapping[str, int]
    ) -> ForkedProcess:
        """Start a rank, and return it.

        ``inherited`` names variables that are to hold the number that a descriptor has there.

        Raises:
            OSError: the system has no room for another process, or the server died.
        """
        script = self._script
        rank = Rank(script.target, script.is_module, [*script.arguments], script.command, {**environment}, [*inherited])
        try:
            self._connection.send(tuple(rank))
            with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                sendfds(line, [stdout, stderr, *inherited.values()])
            answer: int | OSError = self._connection.recv()
        except EOFError as error:
            raise OSError("the process that ranks are forked from was ended") from error
        if isinstance(answer, OSError):
            raise answer
        return ForkedProcess(answer)

    def close(self) -> None:
        """End it; the ranks go on."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
