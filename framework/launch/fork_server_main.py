"""The process that a script's ranks are forked from: it has imported once what each of them would.

Run by its path, followed by the script and its arguments for whoever looks at a list of processes. Nothing of phalanx
can be imported before the package's place is told, and nothing but the standard library is here.

For each rank asked for, this process forks a child that forks the rank and ends. The rank is an orphan then, and
becomes the child of the supervisor, which adopts orphans: it is watched, and dies with the supervisor, like one that
the supervisor started itself.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds
from socket import socket
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn

NAME = b"phalanx-forks"
"""What the system calls this process, of at most 15 bytes; its ranks are called what Python is."""
SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""What may be meant for a rank from the moment on when there is one: blocked until it can listen."""
READY = "ready"
NO_RANK = 0
"""The answer where a rank could not use an accelerator: something that was imported has looked at one already."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_GET_NAME = 16
_LOOK_SECONDS = 0.0005
# Whether a script finds modules in its own folder; before Python 3.11 only -I prevents it.
_FINDS_BESIDE = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))


class Preparation(NamedTuple):
    """What is imported before the first rank is forked, and what ranks then run."""

    parent: int
    path: list[str]
    """``sys.path`` for the imports: ranks begin with that of a new process."""
    modules: list[str]
    target: str
    is_module: bool
    arguments: list[str]
    command: list[str]
    mask: list[int]
    """The signals that ranks begin with blocked."""


class Rank(NamedTuple):
    """A rank to fork. Its descriptors follow: standard output, standard error, and one for each of ``inherited``."""

    environment: dict[str, str]
    inherited: list[str]
    """Variables that are to hold the number of a descriptor."""


def serve(connection: Connection, name: bytes) -> tuple[Rank, list[int]]:
    """Fork ranks until nobody asks for more; return in each of them, with what it is to be."""
    while True:
        try:
            rank = Rank(*connection.recv())
        except (EOFError, OSError):
            # Without the interpreter's farewell to all that was imported.
            os._exit(0)
        with socket(fileno=os.dup(connection.fileno())) as line:
            descriptors = recvfds(line, 2 + len(rank.inherited))
        answer = _fork(connection)
        if answer is None:
            _name(name)
            return rank, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(answer)


def _fork(connection: Connection) -> int | OSError | None:
    """Fork a rank as a child of this process's parent.

    Return its number, or what prevented it; None in the rank.
    """
    parent = os.getppid()
    reading, writing = os.pipe()
    try:
        between = _fork_quietly()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return error
    if between == 0:
        os.close(reading)
        connection.close()
        between = os.getpid()
        if (number := _fork_on()) is not None:
            os.write(writing, str(number).encode())
            os._exit(0)
        os.close(writing)
        _become_child_of(parent, between)
        return None
    os.close(writing)
    with open(reading, "rb") as answers:
        number = int(answers.read() or NO_RANK)
    # From here on the rank is the supervisor's.
    os.waitpid(between, 0)
    return number if number >= 0 else OSError(-number, os.strerror(-number))


def _fork_on() -> int | None:
    """Fork the rank in the process between; return its number, a negative error, or that it would be of no use."""
    for name in ("torch.cuda", "torch.xpu"):
        is_in_bad_fork: Callable[[], bool] | None = getattr(sys.modules.get(name), "_is_in_bad_fork", None)
        if is_in_bad_fork is not None and is_in_bad_fork():
            return NO_RANK
    try:
        return _fork_quietly() or None
    except OSError as error:
        return -(error.errno or 1)


def _fork_quietly() -> int:
    with warnings.catch_warnings():
        # Python warns of threads that the copy lacks: numpy's, which end before a fork and begin anew after it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_child_of(parent: int, between: int) -> None:
    """Wait until this process belongs to ``parent``, and have the system kill it when that ends."""
    while os.getppid() == between:
        time.sleep(_LOOK_SECONDS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _name(name: bytes | None = None) -> bytes:
    """Set what the system calls this process, and return what it called it before."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.create_string_buffer(16)
    prctl(_PR_GET_NAME, before, 0, 0, 0)
    if name is not None:
        prctl(_PR_SET_NAME, name, 0, 0, 0)
    return before.value


def _import(preparation: Preparation) -> None:
    """Import what ranks will need. What cannot be imported is left for the ranks to tell of."""
    before = sys.path[:]
    sys.path[:] = preparation.path
    for module in preparation.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    sys.path[:] = before
    for stream in (sys.stdout, sys.stderr):
        # What an import has printed would be printed by each rank again.
        stream.flush()
    # No rank looks through it for garbage, which would make it copies of its own.
    gc.collect()
    gc.freeze()


def _become(rank: Rank, descriptors: Sequence[int], command: list[str]) -> None:
    """Take over what a process of its own would have begun with."""
    for descriptor, standard in zip(descriptors, (1, 2), strict=False):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(rank.environment)
    os.environ.update({name: str(number) for name, number in zip(rank.inherited, descriptors[2:], strict=True)})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
    if random := sys.modules.get("numpy.random"):
        # Python's own generator is seeded anew in a forked process, torch's begins with the same seed in each.
        random.seed()
    sys.orig_argv[:] = command


def _main_of(given: Preparation) -> tuple[ModuleType, CodeType]:
    """Return the module ``__main__`` of a rank, and what is to be run in it."""
    main = ModuleType("__main__")
    if given.is_module:
        if _FINDS_BESIDE:
            sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(given.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{given.target}.__main__")
        if spec is None or spec.loader is None:
            raise ImportError(f"No module named {given.target}")
        file, package, loader, code = spec.origin, spec.parent, spec.loader, _code(spec.loader, spec.name)
    else:
        if _FINDS_BESIDE:
            sys.path.insert(0, os.path.dirname(os.path.realpath(given.target)))
        spec, file, package = None, given.target, None
        loader = SourceFileLoader("__main__", given.target)
        code = loader.source_to_code(loader.get_data(given.target), given.target)
    vars(main).update(__file__=file, __spec__=spec, __package__=package, __loader__=loader, __builtins__=builtins)
    sys.argv[:] = [file or given.target, *given.arguments]
    sys.modules["__main__"] = main
    return main, code


def _code(loader: Any, name: str) -> CodeType:
    code: CodeType | None = loader.get_code(name)
    if code is None:
        raise ImportError(f"No code object available for {name}")
    return code


def _run(given: Preparation) -> NoReturn:
    """Run the script, and end as Python does: what it raised is shown without the lines of this file."""
    try:
        main, code = _main_of(given)
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            _die_of_interrupt()
        sys.exit(1)
    sys.exit(0)


def _die_of_interrupt() -> None:
    lasts: tuple[Callable[[], object], ...] = (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush)
    for last in lasts:
        with contextlib.suppress(BaseException):
            last()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> NoReturn:
    """Prepare, fork, and be a rank."""
    name = _name(NAME)
    # Inherited as ignored, it would have the system forget how the process between ended.
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _FINDS_BESIDE:
        # This file's own folder, through whatever links: nobody asked for modules from there.
        del sys.path[0]
    # What asks for ranks is connected to the standard input; theirs is empty.
    connection = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    given = Preparation(*connection.recv())
    if os.getppid() != given.parent:
        os._exit(0)
    _import(given)
    connection.send(READY)
    rank, descriptors = serve(connection, name)
    _become(rank, descriptors, given.command)
    signal.signal(signal.SIGCHLD, on_child)
    signal.pthread_sigmask(signal.SIG_SETMASK, given.mask)
    _run(given)


if __name__ == "__main__":
    main()
