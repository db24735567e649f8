"""Python processes that have torch and phalanx imported when they start: milliseconds instead of seconds for each.

    WarmPython      runs scripts in processes forked from one that has imported what they need
    NewPython       runs them in new interpreters, where no forked process may be used

A script that runs here finds what a new interpreter would give it: its own session, environment, directory, arguments
and module ``__main__``. If it starts ranks, the server that they are forked from is warm too. What a test says about
importing itself, the interpreter's options or variables that libraries read as they are loaded needs a new interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
# What ranks and the scripts that start them use.
_LIBRARIES = (
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "phalanx",
    "phalanx.callbacks",
    "phalanx.checkpoint",
    "phalanx.loggers",
    "phalanx.precisions.true",
    "phalanx.strategies",
    "phalanx.strategies.ddp",
    "phalanx.strategies.fsdp.strategy",
    "phalanx.strategies.pipeline.strategy",
    "phalanx.strategies.single",
    "phalanx.framework.fabric.fabric",
    "phalanx.framework.launch.script_launcher",
    "phalanx.framework.checkpoint.inspection",
    "phalanx.framework.memory.memory_plan",
    "phalanx.framework.trainer.assembly",
    "phalanx.framework.trainer.auto_strategy",
    "phalanx.framework.trainer.rehearsals",
    "phalanx.framework.trainer.trainer",
    "phalanx.framework.watchdog.in_process_watchdog",
    "phalanx.framework.launch.fork_server",
)
# What a library imports when it is first used. DeepSpeed's first engine imports torch's compiler, which takes 2 s.
_LATER = {
    "deepspeed": (
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "torch.utils.cpp_extension",
    ),
    "transformers": (
        "transformers.models.auto.modeling_auto",
        "transformers.models.bert.modeling_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
    ),
}


class Request(NamedTuple):
    """A script to run. Its descriptors follow: the status pipe, standard output, and one for each of ``inherited``."""

    script: str
    arguments: list[str]
    directory: str
    environment: dict[str, str]
    inherited: list[str]
    """Variables that are to hold the number of a descriptor."""


class WarmProcess(subprocess.Popen[str]):
    """A script that ``WarmPython`` runs: no child of this process, and used as one."""

    def __init__(self, args: Sequence[str], status: Connection, stdout: IO[str] | None) -> None:
        self._status = status
        super().__init__(args, text=True)
        self.stdout = stdout

    def _execute_child(self, *_: Any, **__: Any) -> None:
        self.pid = self._status.recv()

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._status.poll():
            self._note_end()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags and not self._status.poll():
            return 0, 0
        self._note_end()
        return 0, 0

    def _note_end(self) -> None:
        try:
            self.returncode = os.waitstatus_to_exitcode(self._status.recv())
        except EOFError:
            self.returncode = -signal.SIGKILL
        self._status.close()


class WarmPython:
    """A process that has imported what scripts need, and further ``libraries``, and that they are forked from."""

    def __init__(self, variables: Mapping[str, str], libraries: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno()), *libraries],
                env={**os.environ, **variables},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=_tie_to(os.getpid()),
            )
        self._line = ours

    @property
    def pid(self) -> int:
        """The process that is forked from."""
        return self._server.pid

    def start(
        self,
        script: Path,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        stdout: int | None = None,
        inherited: Mapping[str, int] | None = None,
    ) -> WarmProcess:
        """Run a script; its standard output and error are one stream, a pipe where ``stdout`` is not given."""
        status, theirs = Pipe()
        reading = -1
        if piped := stdout is None:
            reading, stdout = os.pipe()
        request = Request(str(script), [*arguments], str(directory), {**environment}, [*(inherited or ())])
        connection = Connection(os.dup(self._line.fileno()))
        with connection, theirs:
            connection.send(tuple(request))
            sendfds(self._line, [theirs.fileno(), stdout, *(inherited or {}).values()])
        if piped:
            os.close(stdout)
        command = [sys.executable, str(script), *arguments]
        return WarmProcess(command, status, open(reading) if piped else None)

    def close(self) -> None:
        """End it, and what still runs."""
        self._line.close()
        self._server.kill()
        self._server.wait()


class NewPython:
    """Starts scripts as ``WarmPython`` does, each in a new interpreter."""

    def start(
        self,
        script: Path,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        stdout: int | None = None,
        inherited: Mapping[str, int] | None = None,
    ) -> subprocess.Popen[str]:
        """Run a script; its standard output and error are one stream, a pipe where ``stdout`` is not given."""
        descriptors = inherited or {}
        return subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=directory,
            env={**environment, **{name: str(descriptor) for name, descriptor in descriptors.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[*descriptors.values()],
            start_new_session=True,
            preexec_fn=_tie_to(os.getpid()),
        )


def _tie_to(parent: int) -> Callable[[], None]:
    """Return what a new child calls to be killed when its parent ends."""
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


# ---- in the process that scripts are forked from ---------------------------------------------------------------------


def serve(line: socket.socket, libraries: Sequence[str]) -> NoReturn:
    """Fork scripts until nobody asks for more."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    variables = dict(os.environ)
    for name in libraries:
        _import(name)
    # Some set variables for the processes that they start.
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    # What is looked up once would be this process's in each of them.
    tempfile.tempdir = None
    gc.collect()
    gc.freeze()
    connection = Connection(os.dup(line.fileno()))
    server = os.getpid()
    while True:
        try:
            request = Request(*connection.recv())
        except EOFError:
            os._exit(0)
        status, *descriptors = recvfds(line, 2 + len(request.inherited))
        if os.fork() == 0:
            _tie_to(server)()
            connection.close()
            line.close()
            _watch(request, status, descriptors)
        for descriptor in (status, *descriptors):
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _import(library: str) -> None:
    # Some are not installed with every version of torch. DeepSpeed chooses the type of device as it is imported.
    with contextlib.suppress(ImportError):
        if library == "deepspeed":
            from phalanx.strategies.deepspeed.library import quiet_import

            os.environ["DS_ACCELERATOR"] = "cpu"
            with quiet_import():
                importlib.import_module(library)
        importlib.import_module(library)
        for name in _LATER.get(library, ()):
            importlib.import_module(name)


def _watch(request: Request, status: int, descriptors: list[int]) -> NoReturn:
    """Fork the script, tell its number, wait for it, and tell how it ended."""
    watcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _tie_to(watcher)()
        os.setsid()
        _run(request, descriptors)
    for descriptor in (*descriptors, 1, 2):
        os.close(descriptor)
    with Connection(status) as told:
        told.send(pid)
        with contextlib.suppress(OSError):
            told.send(os.waitpid(pid, 0)[1])
    os._exit(0)


def _run(request: Request, descriptors: list[int]) -> NoReturn:
    """Run the script in this process, as a new interpreter would."""
    from phalanx.framework.launch import fork_server, fork_server_main

    os.chdir(request.directory)
    command = [sys.executable, request.script, *request.arguments]
    rank = fork_server_main.RankRequest(request.environment, request.inherited)
    streams = [os.open(os.devnull, os.O_RDONLY), descriptors[0], os.dup(descriptors[0])]
    fork_server_main._become_rank(rank, [*streams, *descriptors[1:]], command)
    _apply_environment()
    fork_server.subprocess = _WarmServer()  # type: ignore[attr-defined,assignment]
    path = [*sys.path]
    fork_server_main._run(
        fork_server_main.Preparation(0, path, [], request.script, False, request.arguments, command, [])
    )


def _apply_environment() -> None:
    """Do what a library does by a variable as it is loaded."""
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


class _WarmServer:
    """Stands for the module ``subprocess`` where a script starts the server of its ranks: the first one is warm."""

    def __init__(self) -> None:
        self._ours, theirs = Pipe()
        parent = os.getpid()
        self._pid: int | None = os.fork()
        if self._pid == 0:
            self._ours.close()
            _tie_to(parent)()
            _wait_to_serve(theirs)
        theirs.close()

    def Popen(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, stdin: int, preexec_fn: Any
    ) -> Any:
        """Start the server."""
        if self._pid is None:
            return subprocess.Popen(command, env=env, cwd=cwd, stdin=stdin, preexec_fn=preexec_fn)
        process, self._pid = _Child(self._pid), None
        with self._ours:
            self._ours.send((list(command), cwd or os.getcwd(), dict(env)))
            with socket.socket(fileno=os.dup(self._ours.fileno())) as line:
                sendfds(line, [stdin, 1, 2])
        return process


class _Child(subprocess.Popen[bytes]):
    """A child that was forked."""

    def __init__(self, pid: int) -> None:
        self._forked = pid
        super().__init__([])

    def _execute_child(self, *_: Any, **__: Any) -> None:
        self.pid = self._forked


def _wait_to_serve(requests: Connection) -> NoReturn:
    """Be the server that ranks are forked from, once it is asked for."""
    from phalanx.framework.launch import fork_server_main

    before = fork_server_main._process_name(fork_server_main.NAME)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        command, directory, environment = requests.recv()
    except EOFError:
        os._exit(0)
    with socket.socket(fileno=os.dup(requests.fileno())) as line:
        for descriptor, standard in zip(recvfds(line, 3), (0, 1, 2), strict=True):
            os.dup2(descriptor, standard)
            os.close(descriptor)
    requests.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, fork_server_main.SIGNALS)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    _apply_environment()
    sys.argv[:], sys.orig_argv[:] = command[1:], command
    sys.path.insert(0, os.path.dirname(command[1]))
    fork_server_main._process_name(before)
    fork_server_main.main()


if __name__ == "__main__":
    # This file's own folder: scripts begin with theirs.
    del sys.path[0]
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
