"""Exit hooks of ranks and scripts that end with an error: the exit code, and a traceback that is shown once."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from functools import partial
from types import TracebackType
from typing import NoReturn

from ..core.errors import PhalanxError, Preempted
from ..system.entry_script import can_rerun_script
from ..system.environment import error_dir, hiding_secrets, own_records, started_by_torchrun
from ..system.failing_exit import prepare_failing_exit
from ..system.failure_records import INTERRUPTED, Failure, brief_traceback, exit_code_of, passes_phalanx
from ..system.launcher_env import Placement
from ..system.processes import end_with_parent


def install_rank_hooks(placement: Placement) -> None:
    """Make this process exit with the exit code of its error if it is a rank of a launch; otherwise do nothing.

    - A rank that phalanx has started records its traceback. The supervisor shows only that of the rank at fault.
    - Under another launcher the rank prints its traceback, each line prefixed with the rank.
    - Under torchrun the rank is also made to end with its agent. Without this it would continue after the agent's end.
    """
    if placement.launcher is not None:
        sys.excepthook = partial(_end_rank, placement)
        if started_by_torchrun():
            end_with_parent()


def write_error(text: str) -> None:
    """Write a line to the standard error that this process started with."""
    # torch replaces sys.stderr by a buffer while an exception hook runs, and this process ends before the buffer is
    # shown.
    stream = sys.__stderr__ or sys.stderr
    # A closed pipe or a full disk must not replace the error that ends this process.
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(text + "\n")
            stream.flush()


def report_failure(rank: int, error: BaseException) -> None:
    """Record the error that ends this rank in a file for the supervisor.

    It is printed instead if there is no supervisor, or if the file cannot be written, as on a full disk. Of a run that
    was asked to end, only the message is printed.
    """
    failure = Failure.of(rank, error, hiding_secrets())
    if error_dir() is None:
        asked = isinstance(error, Preempted | KeyboardInterrupt)
        text = (failure.message or "interrupted") if asked else failure.traceback
        write_error("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))
        return
    try:
        own_records().record_failure(failure)
    except OSError:
        # The supervisor reads this rank's output, prefixes it with the rank, and shows the last lines.
        write_error(failure.brief)


def end_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error of a script that is not a rank, and exit with the error's own code.

    phalanx installs it as ``sys.excepthook`` when it is imported. Of an error that was raised inside of a call of
    phalanx, the frames of phalanx and torch are left out; of a Ctrl-C, only the message is shown. Errors in a notebook,
    an interpreter or a test, and in a script that Python inspects interactively afterwards, are shown as Python does.
    """
    if sys.flags.inspect or not can_rerun_script():
        sys.__excepthook__(kind, error, trace)
        return
    if isinstance(error, PhalanxError) or passes_phalanx(error):
        interrupted = isinstance(error, KeyboardInterrupt)
        write_error(hiding_secrets()(str(error) or "interrupted" if interrupted else brief_traceback(error)))
    else:
        sys.__excepthook__(kind, error, trace)
    _kill_workers()
    code = exit_code_of(error)
    if code not in (1, INTERRUPTED):
        _exit(code)


def quick_exit(code: int) -> SystemExit:
    """Return the exception with which a process exits that has nothing left to do. Raise it at once.

    The interpreter would collect garbage among all objects of torch at exit, which takes up to a second. If the user's
    code does not handle the exception, the process ends as soon as its exit functions have run. Otherwise, ``finally``
    clauses included, it exits as usual.
    """
    error = SystemExit(code)
    if threading.current_thread() is threading.main_thread():
        atexit.register(_exit_if_uncaught, error, code)
    return error


def _exit_if_uncaught(error: SystemExit, code: int) -> None:
    """End the process if ``error`` has left all frames: the last line of each is the one that it was raised from."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_lineno != trace.tb_lineno:
            return
        trace = trace.tb_next
    atexit.unregister(_exit_if_uncaught)
    _exit(code)


def _end_rank(
    placement: Placement, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        report_failure(placement.rank, error.with_traceback(trace))
    finally:
        _kill_workers()
        prepare_failing_exit()
        # The interpreter would exit with 1 for any error, and join threads that may wait for other ranks.
        _exit(exit_code_of(error))


def _kill_workers() -> None:
    """Kill this process's DataLoader workers, which the traceback keeps alive.

    Each of them would otherwise delay the exit by seconds.
    """
    with contextlib.suppress(BaseException):
        # torch's handler raises when a worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()


def _exit(code: int) -> NoReturn:
    """Run exit functions and flush the output, then end the process without waiting for its threads."""
    for last in (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(BaseException):
            last()
    os._exit(code)
