"""How a rank, or a script, ends after an error: with the error's exit code, and its traceback shown once."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from functools import partial
from types import TracebackType
from typing import NoReturn

from ..core.errors import ConfigurationError, Preempted
from ..distributed.world import Placement
from ..system.entry_script import can_rerun_script
from ..system.environment import error_dir, failure_of, hiding_secrets, started_by_torchrun
from ..system.failure_records import INTERRUPTED, exit_code_of, record_failure
from ..system.processes import end_with_parent
from ..system.traceback_summary import brief_traceback


def install_rank_hooks(placement: Placement) -> None:
    """Have this rank end with its error's exit code, and show its traceback once. Does nothing outside a launch.

    It ends with what started it, also where that is torchrun, whose ranks would go on without it. A rank that phalanx
    started records the traceback, and the supervisor shows that of the rank at fault alone; under another launcher the
    rank prints it, each line marked with the rank.
    """
    if placement.launcher is not None:
        sys.excepthook = partial(_end_rank, placement)
        if started_by_torchrun():
            end_with_parent()


def install_exit_codes() -> None:
    """Have a script that is no rank end with its error's exit code, where that is not Python's own 1."""
    if sys.excepthook is sys.__excepthook__ and can_rerun_script():
        sys.excepthook = _end_script


def write_error(text: str) -> None:
    """Show a text on the standard error as it was when this process began."""
    # torch puts a buffer in place of sys.stderr while an exception hook runs, and this process ends before it is shown.
    stream = sys.__stderr__ or sys.stderr
    # Nobody may be there to read it any more, or its file lie on a full disk; what ends this process is another error.
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(text + "\n")
            stream.flush()


def tell_of_failure(rank: int, error: BaseException) -> None:
    """Leave the error that ends this rank for whoever watches over it; show it where nobody does, or a disk is full."""
    failure = failure_of(rank, error)
    directory = error_dir()
    if directory is None:
        text = failure.message if isinstance(error, Preempted) else failure.traceback
        write_error("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))
        return
    try:
        record_failure(directory, failure)
    except OSError:
        # Whoever reads what this rank prints marks it, and shows the end of it.
        write_error(failure.brief)


def _end_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ConfigurationError):
        write_error(hiding_secrets()(brief_traceback(error)))
    else:
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
        tell_of_failure(placement.rank, error.with_traceback(trace))
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
