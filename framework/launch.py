"""Starting the ranks of one machine: the script once for each, or a function in forked copies of this process.

launch_script      this process becomes the supervisor; what follows in the script runs in the ranks alone
launch_function    for notebooks and the interpreter, where there is no script to run again
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from .errors import ConfigurationError, RankError, StalledError
from .failures import INTERRUPTED, exit_code_of, record_failure
from .rank_output import RankOutput
from .restarts import Restarts, attempt_directory, run_directory
from .supervisor import Supervisor, Verdict, die_with_parent
from .world import (
    Placement,
    adopt_environment,
    error_dir,
    failure_of,
    hiding_secrets,
    rank_environment,
    threads_for_ranks,
)

T = TypeVar("T")

# Running these again in every rank would run all their tests until they come to the same place.
_TEST_RUNNERS = frozenset({"pytest", "py.test", "_pytest", "unittest", "nose2"})
# Of the directory that the ranks of a launch share; the supervisor's process number follows.
_PREFIX = "phalanx-"
# Of what a rank printed that ended without a traceback.
_LAST_LINES = 10


@dataclass(frozen=True)
class _Meeting:
    """What the ranks of one attempt share: a private directory, and a socket that listens on loopback alone."""

    directory: str
    listener: socket.socket
    num_ranks: int
    attempt: int = 0

    def environment(self, rank: int) -> dict[str, str]:
        return rank_environment(
            rank=rank,
            size=self.num_ranks,
            port=self.listener.getsockname()[1],
            store_fd=self.listener.fileno() if rank == 0 else None,
            error_dir=self.directory,
            threads=threads_for_ranks(self.num_ranks),
            attempt=self.attempt,
        )


def _remove_leftovers(directory: Path) -> None:
    """Remove what supervisors that were killed have left; each names its process. Never through a link."""
    for path in directory.glob(f"{_PREFIX}[0-9]*-*"):
        process = path.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdecimal() and not _is_running(int(process)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def _private_directory() -> Iterator[str]:
    """Make the directory in which ranks leave their notes; it is removed at the end."""
    _remove_leftovers(Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _meeting(launch_directory: str, num_ranks: int, attempt: int = 0) -> Iterator[_Meeting]:
    directory = attempt_directory(launch_directory, attempt)
    os.mkdir(directory)
    # Bound now and handed to rank 0, so that no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(64, 4 * num_ranks))
    try:
        yield _Meeting(directory, listener, num_ranks, attempt)
    finally:
        listener.close()


def launch_script(num_ranks: int, max_restarts: int = 0, keeps_files: bool = False) -> NoReturn:
    """Run this script once for each rank, watch them, and end with their exit code.

    Ranks that fail are started again up to ``max_restarts`` times, unless that would not change their end. What others
    than rank 0 print is shown where they keep no files that it could go to.

    Raises:
        SystemExit: always, once all ranks have ended.
        ConfigurationError: there is no script to run again.
    """
    if not can_rerun_script():
        raise ConfigurationError(
            "There is no script that could be run again for each rank; in a notebook or an interpreter, fork them."
        )
    command = _command()
    restarts = Restarts(max_restarts)
    with _private_directory() as directory:
        supervisor = Supervisor(directory, adopts_orphans=True)
        in_main_thread = threading.current_thread() is threading.main_thread()
        with supervisor.handling_signals() if in_main_thread else contextlib.nullcontext():
            while True:
                with _meeting(directory, num_ranks, restarts.done) as meeting:
                    verdict = _attempt(command, meeting, supervisor, shows_all=not keeps_files)
                wait = None if supervisor.was_told_to_end else restarts.after(verdict.exit_code, verdict.step)
                if wait is None:
                    break
                _write_error(
                    f"{verdict.message}\nphalanx: the ranks are started again in {wait:g} s, from the newest good "
                    f"checkpoint (restart {restarts.done} of {max_restarts})"
                )
                if (told := supervisor.pause(wait)) is not None:
                    verdict = told
                    break
    if restarts.refusal:
        _write_error(f"phalanx: {restarts.refusal}")
    if verdict.message:
        _write_error(verdict.message)
    # Else the interpreter looks through all that torch has made for garbage once more as it ends: up to a second.
    gc.freeze()
    raise SystemExit(verdict.exit_code)


def _attempt(command: Sequence[str], meeting: _Meeting, supervisor: Supervisor, shows_all: bool) -> Verdict:
    """Start the ranks once and watch them to their end."""
    supervisor.begin_again(meeting.directory)
    head = f"attempt {meeting.attempt + 1}, begun {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with RankOutput(partial(run_directory, meeting.directory), head, shows_all, hiding_secrets()) as output:
        try:
            for rank in range(meeting.num_ranks):
                supervisor.add(_start(command, meeting, rank, output))
            meeting.listener.close()
            verdict = supervisor.watch()
        except BaseException:
            supervisor.stop()
            raise
        output.settle()
        _show_circumstances(verdict, output, shows_all)
        output.close()
    return verdict


def _show_circumstances(verdict: Verdict, output: RankOutput, shown: bool) -> None:
    """Before the cause of a failure: what the rank at fault printed last, where the screen lacks it, and the files."""
    if verdict.rank is None:
        return
    if verdict.traceback:
        output.add(verdict.rank, verdict.traceback)
    elif verdict.rank != 0 and not shown:
        for line in output.tail(verdict.rank, _LAST_LINES):
            _write_error(f"[rank {verdict.rank}] {line}")
    if output.folder is not None:
        _write_error(f"phalanx: what the ranks printed is in {output.folder}")


def _start(command: Sequence[str], meeting: _Meeting, rank: int, output: RankOutput) -> subprocess.Popen[bytes]:
    with output.streams(rank) as (stdout, stderr):
        return subprocess.Popen(
            command,
            env=meeting.environment(rank),
            pass_fds=(meeting.listener.fileno(),) if rank == 0 else (),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=die_with_parent(),
        )


def launch_function(function: Callable[..., T], args: Sequence[Any], num_ranks: int) -> T:
    """Run ``function(*args)`` in ``num_ranks`` forked copies of this process; return what it returned on rank 0.

    Raises:
        ConfigurationError: this process cannot be forked, or CUDA is in use in it.
        RankError: a rank failed; the others were ended. The message holds its traceback.
        StalledError: a rank stalled; all were ended. The message holds their stacks.
    """
    _check_fork()
    with _private_directory() as directory, _meeting(directory, num_ranks) as meeting:
        ranks = [
            partial(_run_rank, meeting, rank, meeting.environment(rank), function, args) for rank in range(num_ranks)
        ]
        supervisor = Supervisor(meeting.directory)
        with _forked(ranks, supervisor):
            meeting.listener.close()
            verdict = supervisor.watch()
        if verdict.failed:
            raise (StalledError if verdict.exit_code == StalledError.exit_code else RankError)(verdict.message)
        result = _result_path(meeting).read_bytes()
    value: T = pickle.loads(result)
    return value


def can_rerun_script() -> bool:
    """Whether this process runs a script or module that can be run again: not a notebook, an interpreter or tests."""
    main = sys.modules.get("__main__")
    if main is None or hasattr(sys, "ps1"):
        return False
    module = _module_name(main)
    if module is not None:
        return module.partition(".")[0] not in _TEST_RUNNERS
    file = getattr(main, "__file__", None)
    return file is not None and os.path.isfile(file) and os.path.basename(file) not in _TEST_RUNNERS


def install_rank_hooks(placement: Placement) -> None:
    """Have this rank end with its error's exit code, and show its traceback once. Does nothing outside a launch.

    A rank that phalanx started records the traceback, and the supervisor shows that of the rank at fault alone; under
    another launcher the rank prints it, each line marked with the rank.
    """
    if placement.launcher is not None:
        sys.excepthook = partial(_end_rank, placement)


def install_exit_codes() -> None:
    """Have a script that is no rank end with its error's exit code, where that is not Python's own 1."""
    if sys.excepthook is sys.__excepthook__ and can_rerun_script():
        sys.excepthook = _end_script


def _end_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    _end_workers()
    code = exit_code_of(error)
    if code not in (1, INTERRUPTED):
        _leave(code)


def _end_rank(
    placement: Placement, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    code = exit_code_of(error)
    try:
        failure = failure_of(placement.rank, error.with_traceback(trace))
        directory = error_dir()
        if directory is None or not os.path.isdir(directory):
            _write_error("\n".join(f"[rank {placement.rank}] {line}" for line in failure.traceback.splitlines()))
        else:
            record_failure(directory, failure)
    finally:
        _end_workers()
        # The interpreter would end with 1 whatever the error, and wait for threads that may wait for other ranks.
        _leave(code)


def _end_workers() -> None:
    """End a loader's workers, which the traceback keeps: the exit would wait for each of them, for seconds."""
    with contextlib.suppress(BaseException):
        # torch raises where one of them dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()


def _leave(code: int) -> NoReturn:
    for last in (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(BaseException):
            last()
    os._exit(code)


def _write_error(text: str) -> None:
    # torch puts a buffer in place of sys.stderr while an exception hook runs, and this process ends before it is shown.
    stream = sys.__stderr__ or sys.stderr
    if stream is not None:
        stream.write(text + "\n")
        stream.flush()


def _command() -> list[str]:
    """Return the command that runs this script, or module, again as it was started."""
    main = sys.modules["__main__"]
    module = _module_name(main)
    target = [os.path.abspath(str(main.__file__))] if module is None else ["-m", module]
    return [sys.executable, *_interpreter_flags(sys.orig_argv), *target, *sys.argv[1:]]


def _module_name(main: ModuleType) -> str | None:
    """Return the name after ``python -m``, or None for a script; a folder or an archive that is run counts as one."""
    spec = main.__spec__
    if spec is None or spec.name == "__main__":
        return None
    return spec.name.removesuffix(".__main__")


def _interpreter_flags(arguments: Sequence[str]) -> list[str]:
    """Return the interpreter's own options out of a whole command line, such as ``-X dev -W error -O``."""
    flags: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            break
        if argument.startswith("--"):
            flags += [argument, next(rest)] if argument == "--check-hash-based-pycs" else [argument]
            continue
        place = next((place for place, letter in enumerate(argument) if letter in "cmXW"), None)
        if place is not None and argument[place] in "cm":
            # What is to be run begins here, perhaps behind options in one word: -um module.
            flags += [argument[:place]] if place > 1 else []
            break
        flags.append(argument)
        if place == len(argument) - 1:
            flags.append(next(rest))
    return flags


class _ForkedProcess:
    """A forked rank, as the supervisor sees one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _check_fork() -> None:
    if not hasattr(os, "fork"):
        raise ConfigurationError(
            "This system cannot fork a process, which several ranks in a notebook need: put the code into a script."
        )
    if torch.cuda.is_initialized():
        raise ConfigurationError(
            "CUDA is in use in this process, and no forked rank could use it then: restart, and move nothing to CUDA "
            "before the ranks start; or put the code into a script."
        )


@contextlib.contextmanager
def _forked(ranks: Sequence[Callable[[], NoReturn]], supervisor: Supervisor) -> Iterator[None]:
    """Start each of ``ranks`` in a copy of this process, under ``supervisor``; none is left when the context ends.

    They are forked from a thread of their own. The thread that forks is all a copy has, and OpenMP's workers belong to
    the thread that first computed: a copy of that one would wait for workers it does not have, for ever.
    """
    finished, started = threading.Event(), threading.Event()
    errors: list[OSError] = []

    def start() -> None:
        try:
            for rank in ranks:
                supervisor.add(_fork(rank))
        except OSError as error:
            errors.append(error)
        started.set()
        # To the system, the thread is the parent with which its ranks die.
        finished.wait()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(start,), name="phalanx-fork", daemon=True)
    thread.start()
    try:
        started.wait()
        if errors:
            raise errors[0]
        yield
    except BaseException:
        # Ctrl-C in a notebook arrives here.
        supervisor.stop()
        raise
    finally:
        finished.set()
        thread.join()


def _fork(child: Callable[[], NoReturn]) -> _ForkedProcess:
    arm = die_with_parent()
    for stream in (sys.stdout, sys.stderr):
        # What is buffered would be written once by each copy.
        stream.flush()
    with warnings.catch_warnings():
        # Python warns of threads that the copy lacks; the ranks use none of the parent's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        arm()
        child()
    return _ForkedProcess(pid)


def _run_rank(
    meeting: _Meeting, rank: int, environment: dict[str, str], function: Callable[..., Any], args: Sequence[Any]
) -> NoReturn:
    """Be a rank: never return into the copied caller."""
    code = 1
    try:
        _become_rank(meeting, rank, environment)
        result = function(*args)
        if rank == 0:
            _result_path(meeting).write_bytes(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
        code = 0
    except SystemExit as error:
        code = exit_code_of(error)
    except BaseException as error:
        code = exit_code_of(error)
        record_failure(meeting.directory, failure_of(rank, error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        # The exit handlers are the parent's.
        os._exit(code)


def _become_rank(meeting: _Meeting, rank: int, environment: dict[str, str]) -> None:
    adopt_environment(environment)
    # An event loop of the parent would be woken by the rank's signals.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if rank != 0:
        meeting.listener.close()
    torch.set_num_threads(threads_for_ranks(meeting.num_ranks))


def _result_path(meeting: _Meeting) -> Path:
    return Path(meeting.directory) / "result"
