"""``judge``: decides which rank is at fault, from how all ranks of an attempt ended and what they recorded.

When one rank fails, the others fail soon after it: their connections break, or the supervisor ends them. Their errors
are consequences, and often recorded earlier than the cause, which takes its time to exit. So the times that count are
those at which an error was raised, or at which a rank began to leave.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ..core.errors import Preempted, StalledError
from ..system.failure_records import INTERRUPTED, Failure
from ..watchdog.heartbeat import HeartbeatRecord
from ..watchdog.stall_detector import Stall
from .attempt import Attempt, RankProcess

# Signals that ask a process to end. No rank dies of one as a consequence of another rank's death.
_PREEMPTING = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


@dataclass(frozen=True)
class Verdict:
    """The common end of the ranks. ``message`` is empty after success."""

    exit_code: int
    message: str
    failed: bool
    step: int | None = None
    """The optimizer step that was under way at a failure; None where training had not begun."""
    rank: int | None = None
    """The rank at fault, if there is one."""
    traceback: str = ""
    """The full traceback of that rank, which ``message`` shortens."""


def judge(attempt: Attempt, stall: Stall | None) -> Verdict:
    """Return how the ranks of ``attempt`` ended together; ``stall`` is the one for which they were killed.

    The first of these that applies:

    1. Ctrl-C: the user wanted the end, and no rank is at fault.
    2. A stall, unless a rank recorded an error: a rank that hangs as it exits is what the others wait for.
    3. A crash. A killed process records nothing, so any traceback is another rank's, which only lost its connection.
    4. A rank preempted before all had met: what the others then fail of has no cause of its own.
    5. A rank that ended, or began to leave, without an exception before any other failed.
    6. The error that was raised first.
    7. Otherwise no rank failed: they were preempted, ended by SIGTERM, or all is well.
    """
    # Each step below reads files that the ranks wrote; all ranks have ended, so none of them changes any more.
    if attempt.received is signal.SIGINT:
        return Verdict(INTERRUPTED, "interrupted", failed=True)
    failures = attempt.failures()
    if stall is not None and not failures:
        rank = attempt.ranks[stall.ranks[0]]
        step = _step(attempt.last_heartbeat(rank))
        return Verdict(StalledError.exit_code, stall.message, failed=True, step=step, rank=rank.rank)
    if attempt.crashed:
        return _crash(attempt)
    if attempt.never_met:
        return _without_failure(attempt)
    # sys.exit, os._exit and a killed teardown leave no error, yet break the connections of the others, which then
    # record errors. The time at which the rank began to leave shows which came first.
    silent = _first_without_error(attempt, {failure.rank for failure in failures})
    if silent and (not failures or _left_at(attempt, silent) < failures[0].seconds):
        code = silent.code or 0
        how = f"ended with exit code {code}" if code > 0 else "exited the process group and was killed"
        return _blame(attempt, silent, max(code, 1), f"{silent} {how}")
    return _first_error(attempt, failures) if failures else _without_failure(attempt)


def _crash(attempt: Attempt) -> Verdict:
    # Of several crashes the first one: the kernel may have ended others as their memory or their peers went away.
    rank = min(attempt.crashed, key=lambda rank: rank.ended_at)
    signum = -(rank.code or 0)
    if signum in _PREEMPTING and not attempt.any_joined:
        # Ranks that have not met have nothing to save yet; the handlers that would have saved come later.
        text = f"{rank} was ended by {_signal_name(signum)} as it started; run the same command again"
        return Verdict(Preempted.exit_code, text, failed=True)
    return _blame(attempt, rank, 128 + signum, f"{rank} was killed by {_signal_name(signum)}")


def _first_error(attempt: Attempt, failures: list[Failure]) -> Verdict:
    first = failures[0]
    # Exit code 0 looks like success, but inside a stage it leaves the others waiting for a rank that never comes.
    if (quitter := _first_to_quit(attempt, first.seconds)) is not None:
        text = f"rank {quitter.rank} (pid {quitter.pid}) exited the process group with exit code 0"
        return _blame(attempt, attempt.ranks[quitter.rank], first.exit_code, text, quitter)
    # SIGINT was sent to ranks, and not to the supervisor.
    if all(failure.exit_code == INTERRUPTED for failure in failures):
        return Verdict(INTERRUPTED, "interrupted", failed=True)
    # The same error on every rank is a common decision, and its message names the cause.
    everywhere = len(failures) == len(attempt.ranks) > 1 and len({(one.kind, one.message) for one in failures}) == 1
    text = "all ranks failed" if everywhere else f"rank {first.rank} (pid {first.pid}) failed"
    return _blame(attempt, attempt.ranks[first.rank], first.exit_code, text, first)


def _blame(attempt: Attempt, rank: RankProcess, exit_code: int, text: str, failure: Failure | None = None) -> Verdict:
    """Return the verdict that ``rank`` is at fault, with its position in the training."""
    trace = "" if failure is None else f":\n{(failure.brief or failure.traceback).rstrip()}"
    # Shared memory outlives its writer, so a killed rank has a position too.
    record = attempt.last_heartbeat(rank)
    where = f"{text} {record.where}".rstrip() if record is not None else text
    full = "" if failure is None else failure.traceback
    return Verdict(exit_code, f"{where}{trace}", failed=True, step=_step(record), rank=rank.rank, traceback=full)


def _first_without_error(attempt: Attempt, recorded: set[int]) -> RankProcess | None:
    """Return the first rank that ended, or began to leave, by itself and without an exception."""
    unexplained = [rank for rank in attempt.ranks if attempt.has_failed(rank) and rank.rank not in recorded]
    # A rank that the supervisor ended is not the cause, unless it had begun to leave before.
    ended = [rank for rank in unexplained if not rank.was_signalled or _left_at(attempt, rank)]
    return min(ended, key=lambda rank: (_left_at(attempt, rank), rank.ended_at), default=None)


def _first_to_quit(attempt: Attempt, before: float) -> Failure | None:
    """Return the ``SystemExit`` with which a rank quit a stage, code 0, before others failed because of it."""
    pending = [attempt.records.pending_error(rank.rank) for rank in attempt.ranks if rank.code == 0]
    quits = [one for one in pending if one is not None and one.kind == "SystemExit" and one.seconds < before]
    return min(quits, key=lambda one: one.seconds, default=None)


def _left_at(attempt: Attempt, rank: RankProcess) -> float:
    """Return when ``rank`` began to leave; 0, before all else, if it recorded nothing, as after ``os._exit``."""
    return attempt.records.left_at(rank.rank) or 0.0


def _without_failure(attempt: Attempt) -> Verdict:
    # Here a signal to a rank means that it was overdue: after a failure this function is not reached.
    late = [str(rank) for rank in attempt.ranks if rank.was_signalled]
    overdue = f"; {', '.join(late)} did not end in time and had to be killed" if late else ""
    # One preempted rank is enough: the others may have finished, or have been killed before they could save.
    if any(rank.code == Preempted.exit_code for rank in attempt.ranks):
        found = [attempt.records.failure(rank.rank) for rank in attempt.ranks]
        messages = [one.message for one in found if one is not None and one.exit_code == Preempted.exit_code]
        message = next(filter(None, messages), "preempted")
        return Verdict(Preempted.exit_code, message + overdue, failed=True)
    if all(rank.code == 0 for rank in attempt.ranks):
        return Verdict(0, "", failed=False)
    if not attempt.any_joined:
        text = "ended by SIGTERM as the ranks started; run the same command again"
        return Verdict(Preempted.exit_code, text, failed=True)
    return Verdict(128 + signal.SIGTERM, "ended by SIGTERM" + overdue, failed=True)


def _step(record: HeartbeatRecord | None) -> int | None:
    return None if record is None or record.step < 0 else record.step


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
