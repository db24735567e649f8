"""``launch_function``: runs a function in forked copies of this process, for notebooks and interpreters."""

from __future__ import annotations

import contextlib
import contextvars
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from ..core.errors import ConfigurationError, RankError, StalledError
from ..system.environment import adopt_environment, threads_for_ranks
from ..system.failure_records import exit_code_of
from ..system.processes import ForkedProcess, die_with_parent
from .exit_hooks import report_failure
from .launch_context import LaunchContext, launch_context, private_directory
from .supervisor import Supervisor

T = TypeVar("T")


def launch_function(function: Callable[..., T], args: Sequence[Any], num_ranks: int) -> T:
    """Run ``function(*args)`` in ``num_ranks`` forked copies of this process; return what it returned on rank 0.

    Raises:
        ConfigurationError: this process cannot be forked, or CUDA is in use in it.
        RankError: a rank failed, and the others were ended. The message holds its traceback.
        StalledError: a rank stalled, and all were ended. The message holds their stacks.
    """
    _check_fork()
    with private_directory() as directory, launch_context(directory, num_ranks) as context:
        ranks = [partial(_run_rank, context, rank, function, args) for rank in range(num_ranks)]
        supervisor = Supervisor(context.directory)
        with _forked(ranks, supervisor):
            context.listener.close()
            verdict = supervisor.watch()
        if verdict.failed:
            raise (StalledError if verdict.exit_code == StalledError.exit_code else RankError)(verdict.message)
        result = _result_path(context).read_bytes()
    value: T = pickle.loads(result)
    return value


def _check_fork() -> None:
    if not hasattr(os, "fork"):
        raise ConfigurationError(
            "This system cannot fork a process, which several ranks in a notebook require: put the code into a script."
        )
    if torch.cuda.is_initialized():
        raise ConfigurationError(
            "CUDA is in use in this process, and no forked rank could use it then: restart, and move nothing to CUDA "
            "before the ranks start; or put the code into a script."
        )


@contextlib.contextmanager
def _forked(ranks: Sequence[Callable[[], NoReturn]], supervisor: Supervisor) -> Iterator[None]:
    """Start each of ``ranks`` in a copy of this process, under ``supervisor``; on exit all of them have ended.

    They are forked from a new thread. A forked process has only the thread that called fork, and OpenMP's workers
    belong to the thread that first computed: a copy of that thread would wait forever for workers it does not have.
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
        # For the kernel this thread is the parent of the ranks, so they die with it.
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


def _fork(child: Callable[[], NoReturn]) -> ForkedProcess:
    arm = die_with_parent()
    for stream in (sys.stdout, sys.stderr):
        # Each copy would write buffered output again.
        stream.flush()
    with warnings.catch_warnings():
        # Python warns of threads that the copy lacks; the ranks use none of the parent's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        arm()
        child()
    return ForkedProcess(pid)


def _run_rank(context: LaunchContext, rank: int, function: Callable[..., Any], args: Sequence[Any]) -> NoReturn:
    """Run the function as a rank, and exit: never return into the copied caller."""
    code = 1
    try:
        _become_rank(context, rank)
        result = function(*args)
        if rank == 0:
            _result_path(context).write_bytes(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
        code = 0
    except SystemExit as error:
        code = exit_code_of(error)
    except BaseException as error:
        code = exit_code_of(error)
        report_failure(rank, error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        # Not sys.exit: the exit handlers belong to the parent.
        os._exit(code)


def _become_rank(context: LaunchContext, rank: int) -> None:
    adopt_environment(context.environment(rank))
    # Otherwise signals of the rank would wake the parent's event loop, which a notebook has.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if rank != 0:
        context.listener.close()
    torch.set_num_threads(threads_for_ranks(context.num_ranks))


def _result_path(context: LaunchContext) -> Path:
    return Path(context.directory) / "result"
