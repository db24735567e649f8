"""The fork server: the process that imports the modules of a script's ranks, and from which they are forked.

The supervisor runs this file by its path, followed by the script and its arguments, which thus appear in a list of
processes. phalanx cannot be imported before the supervisor has sent ``sys.path``, so this file uses only the standard
library.

For each requested rank this process forks a child, which forks the rank and ends. The rank is then an orphan and
becomes a child of the supervisor, which adopts orphans: it is supervised and dies with the supervisor, like a rank
that the supervisor has started directly. The fork server of ``multiprocessing`` cannot be used: its children are
not children of the supervisor, share one environment and one output, and import the script a second time.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
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
from runpy import _run_module_as_main  # type: ignore[attr-defined]
from socket import socket
from types import ModuleType
from typing import NamedTuple, NoReturn

NAME = b"phalanx-forks"
"""The name of this process in a list of processes, at most 15 bytes; its ranks have the interpreter's name."""
SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that may be sent to a rank as soon as it exists; they are blocked until it can handle them."""
READY = "ready"
SPOILED = "spoiled"
"""Sent in place of ``READY`` if the imported libraries have initialized an accelerator."""
NUM_STANDARD = 3
"""The descriptors of standard input, output and error."""
NO_RANK = 0
"""The reply if a rank could not use an accelerator, because an imported module has initialized it already."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_GET_NAME = 16
_LOOK_SECONDS = 0.0005
_CUDA_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3
SEARCHES_OWN_FOLDER = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
"""Whether a script can import modules from its own folder; before Python 3.11 only -I prevents it."""


class Preparation(NamedTuple):
    """The modules to import before the first rank is forked, and the target that ranks run."""

    parent: int
    path: list[str]
    """``sys.path`` for the imports only: ranks start with the ``sys.path`` of a new process."""
    modules: list[str]
    target: str
    is_module: bool
    arguments: list[str]
    command: list[str]
    mask: list[int]
    """The signals that are blocked when a rank starts."""
    libraries: tuple[str, ...] = ()
    """Further modules to import, which may turn out to prevent forking."""


class RankRequest(NamedTuple):
    """A rank to fork. Its descriptors follow: standard input, output and error, and one for each of ``inherited``."""

    environment: dict[str, str]
    inherited: list[str]
    """Variables that are set to the number of a descriptor."""


def serve(connection: Connection, name: bytes) -> tuple[RankRequest, list[int]]:
    """Fork a rank for each request; return in each of the ranks, with its request and its descriptors."""
    while True:
        try:
            request = RankRequest(*connection.recv())
        except (EOFError, OSError):
            # The supervisor needs no more ranks. A regular exit would tear down all imported modules, which takes time.
            os._exit(0)
        with socket(fileno=os.dup(connection.fileno())) as line:
            descriptors = recvfds(line, NUM_STANDARD + len(request.inherited))
        answer = _fork_rank(connection)
        if answer is None:
            _process_name(name)
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(answer)


def _fork_rank(connection: Connection) -> int | OSError | None:
    """Fork a rank that becomes a child of this process's parent; return its pid, or an error; None in the rank."""
    parent = os.getppid()
    reading, writing = os.pipe()
    try:
        between = _fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return error
    if between == 0:
        os.close(reading)
        connection.close()
        between = os.getpid()
        if (answer := _fork_again()) is not None:
            os.write(writing, str(answer).encode())
            os._exit(0)
        os.close(writing)
        _wait_for_parent(parent, between)
        return None
    os.close(writing)
    with open(reading, "rb") as answers:
        number = int(answers.read() or NO_RANK)
    # Once the intermediate process has been waited for, the rank is a child of the supervisor.
    os.waitpid(between, 0)
    return number if number >= 0 else OSError(-number, os.strerror(-number))


def _fork_again() -> int | None:
    """Fork the rank in the intermediate process; return its pid, ``NO_RANK`` or a negative errno; None in the rank."""
    if is_bad_fork():
        return NO_RANK
    try:
        return _fork() or None
    except OSError as error:
        return -(error.errno or 1)


def is_bad_fork() -> bool:
    """Whether torch has recorded that this process was forked from one that had initialized an accelerator.

    ``torch.utils.rename_privateuse1_backend`` documents the function, which device modules provide. torch may not be
    imported here, so its modules are looked up.
    """
    for name in ("torch.cuda", "torch.xpu"):
        is_in_bad_fork: Callable[[], bool] | None = getattr(sys.modules.get(name), "_is_in_bad_fork", None)
        if is_in_bad_fork is not None and is_in_bad_fork():
            return True
    return False


def _has_initialized_cuda() -> bool:
    """Whether this process has initialized the driver of CUDA, which torch does not record if other code did it."""
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _prevents_forks() -> bool:
    """Whether an imported module has initialized an accelerator, which a forked process could not use."""
    if _has_initialized_cuda():
        return True
    if (probe := _fork()) == 0:
        os._exit(is_bad_fork())
    return os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]) != 0


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads that the copy lacks: numpy's, which end before a fork and start again after it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _wait_for_parent(parent: int, between: int) -> None:
    """Wait until this process is a child of ``parent``, and make the kernel kill it when the parent ends."""
    while os.getppid() == between:
        time.sleep(_LOOK_SECONDS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _process_name(name: bytes) -> bytes:
    """Set the name of this process in a list of processes, and return the previous name."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.create_string_buffer(16)
    prctl(_PR_GET_NAME, before, 0, 0, 0)
    prctl(_PR_SET_NAME, name, 0, 0, 0)
    return before.value


def _import(preparation: Preparation) -> None:
    """Import the modules of the ranks. The error of a module that cannot be imported is left to the ranks to report."""
    before = sys.path[:]
    sys.path[:] = preparation.path
    for module in [*preparation.modules, *preparation.libraries]:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    sys.path[:] = before
    for stream in (sys.stdout, sys.stderr):
        # Each rank would print buffered output of an import again.
        stream.flush()
    # Excludes these objects from garbage collection in the ranks, which would copy the memory that all ranks share.
    gc.collect()
    gc.freeze()


def _become_rank(request: RankRequest, descriptors: Sequence[int], command: list[str]) -> None:
    """Set the state with which a new process would start."""
    for standard, descriptor in enumerate(descriptors[:NUM_STANDARD]):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    numbers = zip(request.inherited, descriptors[NUM_STANDARD:], strict=True)
    os.environ.update({name: str(number) for name, number in numbers})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
    if random := sys.modules.get("numpy.random"):
        # Python reseeds its own generator after a fork; torch's starts with the same seed in every process.
        random.seed()
    sys.orig_argv[:] = command


def run_as_main(target: str, is_module: bool, arguments: Sequence[str]) -> None:
    """Run a script, or a module, as the interpreter would: as ``__main__``. The first folder of ``sys.path`` is new."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    own_folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if SEARCHES_OWN_FOLDER:
        sys.path.insert(0, own_folder)
    sys.argv[:] = [target, *arguments]
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    if is_module:
        _run_module_as_main(target)
        return
    loader = SourceFileLoader("__main__", target)
    main.__file__, main.__loader__ = target, loader
    exec(loader.source_to_code(loader.get_data(target), target), vars(main))


def _run(given: Preparation) -> NoReturn:
    """Run the target, and exit as Python does; the frames of this file are left out of a traceback."""
    try:
        run_as_main(given.target, given.is_module, given.arguments)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        # The error has been shown. The interpreter must still exit as after any error: with 1, or by SIGINT.
        sys.excepthook = lambda *_: None
        raise
    sys.exit(0)


def main() -> NoReturn:
    """Import the modules, fork ranks, and become one in each of them."""
    name = _process_name(NAME)
    # With SIGCHLD ignored, which may be inherited, the kernel would drop the exit code of the intermediate process.
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if SEARCHES_OWN_FOLDER:
        # This file's own folder: its modules must not shadow those of the script.
        del sys.path[0]
    # The standard input is the connection to the supervisor; a rank gets the one of its request.
    connection = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    given = Preparation(*connection.recv())
    if os.getppid() != given.parent:
        os._exit(0)
    _import(given)
    connection.send(SPOILED if given.libraries and _prevents_forks() else READY)
    request, descriptors = serve(connection, name)
    _become_rank(request, descriptors, given.command)
    signal.signal(signal.SIGCHLD, on_child)
    signal.pthread_sigmask(signal.SIG_SETMASK, given.mask)
    _run(given)


if __name__ == "__main__":
    main()
