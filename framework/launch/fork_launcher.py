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
from ..core.interception import intercept_loop
from ..system.environment import adopt_environment, threads_for_ranks
from ..system.failure_records import INTERRUPTED, exit_code_of
from ..system.processes import ForkedProcess, die_with_parent
from .exit_hooks import report_failure, write_error
from .fork_server_main import is_bad_fork
from .launch_context import LaunchContext, launch_context, private_directory
from .restart_policy import FitRecord, fits
from .run_notifications import LaunchNotifications
from .supervisor import Supervisor
from .verdict import Verdict

T = TypeVar("T")


def launch_function(
    function: Callable[..., T],
    args: Sequence[Any],
    num_ranks: int,
    at_end: Callable[[list[FitRecord]], None] | None = None,
    uses_cuda: bool = False,
) -> T:
    """Run ``function(*args)`` in ``num_ranks`` forked copies of this process; return what it returned on rank 0.

    The ranks receive SIGINT through this process: a run stops after its step. A second SIGINT ends them at once.

    Args:
        function: called in each rank.
        at_end: called with the fits that the ranks have begun, also after a failure.
        uses_cuda: whether the ranks use CUDA devices.

    Raises:
        KeyboardInterrupt: SIGINT arrived, and rank 0 ended without a result.
        ConfigurationError: this process cannot be forked, or CUDA is in use in it.
        RankError: a rank failed, and the others were ended. The message holds its traceback.
        StalledError: a rank stalled, and all were ended. The message holds their stacks.
    """
    intercept_loop()
    _check_fork(uses_cuda)
    with private_directory() as directory, launch_context(directory, num_ranks) as context:
        ranks = [partial(_run_rank, context, rank, function, args) for rank in range(num_ranks)]
        supervisor, notifications = Supervisor(context.directory), LaunchNotifications(write_error)
        try:
            # SIGTERM ends this process as before, and the ranks with it.
            with supervisor.handling_signals((signal.SIGINT,)), _forked(ranks, supervisor):
                context.close_listener()
                verdict = supervisor.watch()
            notifications.stalled(context.directory, verdict)
            notifications.ended(context.directory, verdict)
            notifications.close()
            result = _result(context, verdict)
        finally:
            if at_end is not None:
                at_end(fits(context.directory))
    value: T = pickle.loads(result)
    return value


def _result(context: LaunchContext, verdict: Verdict) -> bytes:
    path = _result_path(context)
    if verdict.exit_code == INTERRUPTED:
        if not path.exists():
            raise KeyboardInterrupt("The ranks were interrupted and have ended, and what they computed is lost.")
    elif verdict.failed:
        raise (StalledError if verdict.exit_code == StalledError.exit_code else RankError)(verdict.message)
    return path.read_bytes()


def forked_ranks_can_use_cuda() -> bool:
    """Whether a copy of this process could use CUDA devices. It cannot after CUDA was started here.

    A query such as ``torch.cuda.is_available()`` may have started it too, which only a forked process finds out.
    """
    if torch.cuda.is_initialized():
        return False
    probe = _fork(lambda: os._exit(int(is_bad_fork())))
    return os.waitstatus_to_exitcode(os.waitpid(probe.pid, 0)[1]) == 0


def _check_fork(uses_cuda: bool) -> None:
    if not hasattr(os, "fork"):
        raise ConfigurationError(
            "This system cannot fork a process, which several ranks in a notebook require: put the code into a script."
        )
    if torch.cuda.is_initialized():
        raise ConfigurationError(
            "CUDA is in use in this process, and no forked rank could use it then: restart, and move nothing to CUDA "
            "before the ranks start; or put the code into a script."
        )
    if uses_cuda and not forked_ranks_can_use_cuda():
        raise ConfigurationError(
            "CUDA was started in this process, by a query such as torch.cuda.is_available() or by a library, and no "
            "forked rank could use it then: restart, import Trainer or Fabric from phalanx before the query, which "
            "sets PYTORCH_NVML_BASED_CUDA_CHECK=1, or put the code into a script."
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
        # Until a rank has its own handlers, it has copies of this process's, which would act on the other ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
            payload = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            # In one step: the rank may be killed while it writes, and an incomplete result must not be read.
            draft = Path(context.directory) / "result.draft"
            draft.write_bytes(payload)
            draft.replace(_result_path(context))
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The standard input of a notebook is not a terminal. In an interpreter rank 0 may use it: this process waits.
    if rank != 0 or not os.isatty(0):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if rank != 0:
        context.close_listener()
    torch.set_num_threads(threads_for_ranks(context.num_ranks))


def _result_path(context: LaunchContext) -> Path:
    return Path(context.directory) / "result"
