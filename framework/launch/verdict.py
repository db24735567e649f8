"""``judge``: determines the rank at fault from the exit codes and records of all ranks of an attempt.

When one rank fails, the others fail soon after: their connections break, or the supervisor ends them. Their errors are
consequences, and often recorded earlier than the cause, whose rank may exit slowly. So the verdict compares the times
at which an error was raised or a rank began to exit.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ..core.errors import Preempted, StalledError
from ..system.failure_records import INTERRUPTED, Failure
from ..watchdog.heartbeat import OUTSIDE, HeartbeatRecord
from ..watchdog.stall_detector import Stall
from .attempt import Attempt, RankProcess

# Shutdown signals. A rank does not die of one as a consequence of another rank's failure.
_PREEMPTING = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt. ``message`` is empty after success."""

    exit_code: int
    message: str
    failed: bool
    step: int | None = None
    """The optimizer step in progress at a failure; None if training had not begun."""
    rank: int | None = None
    """The rank at fault, if there is one."""
    traceback: str = ""
    """The full traceback of the rank at fault, which ``message`` shortens."""
    advice: str = ""
    """The number of steps since the last checkpoint, and the command that resumes the run; empty without one."""


def judge(attempt: Attempt, stall: Stall | None) -> Verdict:
    """Return the verdict on ``attempt``; ``stall`` is the stall for which the ranks were killed, if any.

    The first of these cases that applies:

    1. Ctrl-C: the user ended the run, and no rank is at fault.
    2. A stall, unless a rank recorded an error: then the others wait for that rank, which hangs during its exit.
    3. A crash. A killed process records no error, so any traceback is from another rank, which lost its connection. An
       abort after a recorded error does not count: CUDA's errors are raised, and then abort the process and its peers.
    4. A rank preempted before the process group was complete: errors of the other ranks are consequences.
    5. A rank that ended, or began to exit, without an exception before any other rank failed.
    6. The error that was raised first.
    7. Otherwise no rank failed: the ranks were preempted, ended by SIGTERM, or successful.
    """
    # Each step below reads files that the ranks wrote, which no longer change as all ranks have ended.
    failures = attempt.failures()
    if attempt.received is signal.SIGINT:
        return _interrupted(failures)
    if stall is not None and not failures:
        rank = attempt.find(stall.ranks[0])
        step = _step(attempt.last_heartbeat(rank))
        return Verdict(StalledError.exit_code, stall.message, failed=True, step=step, rank=rank.rank)
    if crashed := _unexplained_crashes(attempt, {failure.rank for failure in failures}):
        return _crash(attempt, crashed)
    if attempt.never_met:
        return _without_failure(attempt)
    # sys.exit, os._exit and a killed teardown leave no error, yet break the connections of the others, which then
    # record errors. The time at which the rank began to exit shows which was first.
    explained = {failure.rank for failure in failures} | {rank.rank for rank in attempt.crashed}
    silent = _first_without_error(attempt, explained, {failure.lost_rank for failure in failures})
    if silent and (not failures or _left_at(attempt, silent) < failures[0].seconds):
        code = silent.code or 0
        how = f"ended with exit code {code}" if code > 0 else "exited the process group and was killed"
        return _blame(attempt, silent, max(code, 1), f"{silent} {how}")
    return _first_error(attempt, failures) if failures else _without_failure(attempt)


def _unexplained_crashes(attempt: Attempt, recorded: set[int]) -> list[RankProcess]:
    """Return the ranks that crashed, without aborts that follow from an error which an aborted rank recorded."""
    aborted = [rank for rank in attempt.crashed if rank.code == -signal.SIGABRT]
    if not any(rank.rank in recorded for rank in aborted):
        return attempt.crashed
    return [rank for rank in attempt.crashed if rank not in aborted]


def _crash(attempt: Attempt, crashed: list[RankProcess]) -> Verdict:
    # Of several crashes the first one counts: others may be consequences, such as access to memory of an ended rank.
    rank = min(crashed, key=lambda rank: rank.ended_at)
    signum = -(rank.code or 0)
    if signum in _PREEMPTING and not attempt.any_joined:
        # Before the process group is complete there is nothing to save, and the handlers that save are not installed.
        text = f"{rank} was ended by {_signal_name(signum)} as it started; run the same command again"
        return Verdict(Preempted.exit_code, text, failed=True)
    text = f"{rank} was killed by {_signal_name(signum)}"
    failure, cause = _cause_of_abort(attempt, rank) if signum == signal.SIGABRT else (None, "")
    return _blame(attempt, rank, 128 + signum, text, failure, cause)


def _cause_of_abort(attempt: Attempt, rank: RankProcess) -> tuple[Failure | None, str]:
    """Return what is known of an abort: gloo aborts a rank whose collective is another one than that of its peers."""
    others = [one for one in attempt.failures() if one.rank != rank.rank]
    alone = next((one for one in others if ", in save_checkpoint\n" in one.traceback), None)
    if alone is not None:
        return alone, (
            f"; rank {alone.rank} was in save_checkpoint, which every rank must call: leave out conditions such as "
            "is_global_zero, rank 0 alone writes what all ranks hold"
        )
    if len(attempt.ranks) == 1:
        return None, ""
    return None, (
        "; if the output above names gloo, the ranks were in different collectives: run the same layers, and make "
        "the same collective calls, on all of them"
    )


def _first_error(attempt: Attempt, failures: list[Failure]) -> Verdict:
    first = failures[0]
    # Exit code 0 looks like success, but inside a stage it leaves the others waiting for a rank that has ended.
    if (quitter := _first_to_quit(attempt, first.seconds)) is not None:
        text = f"rank {quitter.rank} (pid {quitter.pid}) exited the process group with exit code 0"
        return _blame(attempt, attempt.find(quitter.rank), first.exit_code, text, quitter)
    if (gone := next((rank for rank in attempt.ranks if _left_within_stage(attempt, rank)), None)) is not None:
        return _blame(attempt, gone, first.exit_code, f"{gone} ended with exit code 0 within a stage, as by os._exit")
    # SIGINT was sent to ranks instead of the supervisor.
    if all(failure.exit_code == INTERRUPTED for failure in failures):
        return _interrupted(failures)
    # The same error on every rank is a common decision, and its message names the cause.
    everywhere = len(failures) == len(attempt.ranks) > 1 and len({(one.kind, one.message) for one in failures}) == 1
    text = "all ranks failed" if everywhere else f"rank {first.rank} (pid {first.pid}) failed"
    return _blame(attempt, attempt.find(first.rank), first.exit_code, text, first)


def _interrupted(failures: list[Failure]) -> Verdict:
    """Return the verdict on a Ctrl-C: in the words of a rank that has stopped at a step and saved, if one has."""
    messages = [failure.message for failure in failures if failure.exit_code == INTERRUPTED and failure.message]
    return Verdict(INTERRUPTED, messages[0] if messages else "interrupted", failed=True)


def _blame(
    attempt: Attempt, rank: RankProcess, exit_code: int, text: str, failure: Failure | None = None, cause: str = ""
) -> Verdict:
    """Return the verdict that ``rank`` is at fault, with its position in the training and what else is known."""
    trace = "" if failure is None else f":\n{(failure.brief or failure.traceback).rstrip()}"
    # Shared memory outlives its writer, so a killed rank has a position too.
    record = attempt.last_heartbeat(rank)
    where = f"{text} {record.where}".rstrip() if record is not None else text
    full = "" if failure is None else failure.traceback
    return Verdict(exit_code, f"{where}{cause}{trace}", failed=True, step=_step(record), rank=rank.rank, traceback=full)


def _first_without_error(attempt: Attempt, recorded: set[int], lost: set[int | None]) -> RankProcess | None:
    """Return the first rank that ended, or began to exit, on its own and without an exception."""
    unexplained = [rank for rank in attempt.ranks if attempt.has_failed(rank) and rank.rank not in recorded]
    # A rank that the supervisor ended is not the cause, unless it had begun to exit before.
    ended = [
        rank
        for rank in unexplained
        if not rank.was_signalled or _left_at(attempt, rank) or rank.rank in lost or _ended_with_error(rank)
    ]
    return min(ended, key=lambda rank: (_left_at(attempt, rank), rank.ended_at), default=None)


def _ended_with_error(rank: RankProcess) -> bool:
    """Return whether ``rank`` ended with an exit code that SIGTERM does not cause.

    Such a rank has a record, unless it could not write one, as on a full disk.
    """
    return (rank.code or 0) > 0 and rank.code != 128 + signal.SIGTERM


def _first_to_quit(attempt: Attempt, before: float) -> Failure | None:
    """Return the ``SystemExit`` with code 0 with which a rank left a stage before others failed because of it."""
    pending = [attempt.records.pending_error(rank.rank) for rank in attempt.ranks if rank.code == 0]
    quits = [one for one in pending if one is not None and one.kind == "SystemExit" and one.seconds < before]
    return min(quits, key=lambda one: one.seconds, default=None)


def _left_within_stage(attempt: Attempt, rank: RankProcess) -> bool:
    """Return whether ``rank`` ended with exit code 0 while it trained, without any Python code that runs at an exit."""
    record = attempt.last_heartbeat(rank)
    in_stage = record is not None and record.number > 0 and record.section != OUTSIDE
    return in_stage and rank.code == 0 and attempt.records.left_at(rank.rank) is None


def _left_at(attempt: Attempt, rank: RankProcess) -> float:
    """Return the time at which ``rank`` began to exit; 0, before any other time, without a record (``os._exit``)."""
    return attempt.records.left_at(rank.rank) or 0.0


def _without_failure(attempt: Attempt) -> Verdict:
    # A signal to a rank means here that it was overdue: after a failure this function is not called.
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
