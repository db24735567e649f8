"""``Supervisor``: watches the ranks of one machine, ends them all when one fails, and tells which and why.

Nothing it started outlives it: a rank dies with its supervisor, even with one that is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType

from ..core.errors import Preempted, StalledError
from ..system.failure_records import INTERRUPTED, Failure, has_met, read_failure, read_leaving, read_trouble
from ..system.processes import Process, adopt_orphans, children
from ..watchdog.heartbeat import OUTSIDE, SECTIONS, Beat
from ..watchdog.stall_detector import Stall, Stalls, StartedRanks

POLL_SECONDS = 0.02
# After a rank was seen to fail: how long a crash on another rank, which takes the system longer to end, may still show.
SETTLE_SECONDS = 0.05
# A rank that has recorded its failure, or is leaving, has this long to run its exit handlers.
EXIT_HANDLER_SECONDS = 0.4
# From SIGTERM to SIGKILL once a rank failed; with the two above it keeps the end of all within 2 s.
TERMINATE_SECONDS = 0.8
# How long one may take for its callbacks and loggers after an error, which may wait for ranks that never come.
FAREWELL_SECONDS = 20.0
# How long ranks that were told to end, or left by one that was, may take outside of all that has limits of its own.
PREEMPT_SECONDS = 30.0

# Signals that no rank dies of as a consequence of another's death.
_PREEMPTING = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


@dataclass
class _Rank:
    rank: int
    process: Process
    code: int | None = None
    ended_at: float = 0.0
    was_signalled: bool = False
    was_killed: bool = False

    def poll(self) -> None:
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.ended_at = code, time.monotonic()

    def send(self, signum: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"


@dataclass(frozen=True)
class Verdict:
    """How the ranks ended together. ``message`` is empty after success."""

    exit_code: int
    message: str
    failed: bool
    step: int | None = None
    """The optimizer step that was under way at a failure; None where training had not begun."""
    rank: int | None = None
    """The rank at fault, where one is."""
    traceback: str = ""
    """All of its traceback, of which ``message`` holds a part."""


class Supervisor:
    """The watch over the ranks of one machine. Ranks are handed over as they start, in order.

    Ranks that are started again after a failure are handed over anew, after ``begin_again``.

    With ``adopts_orphans``, what dead ranks leave running becomes a child of this process, and ends after a failure.
    """

    def __init__(self, error_dir: str, adopts_orphans: bool = False) -> None:
        self._adopts_orphans = adopts_orphans and sys.platform == "linux"
        self._received: signal.Signals | None = None
        self._others: set[int] = set()
        self.begin_again(error_dir)
        if self._adopts_orphans:
            self._others = children()
            adopt_orphans()

    @property
    def was_told_to_end(self) -> bool:
        """Whether this process was told from outside to end."""
        return self._received is not None

    def begin_again(self, error_dir: str) -> None:
        """Forget the ranks that have ended."""
        self._error_dir = error_dir
        self._ranks: list[_Rank] = []
        self._crashed: list[_Rank] = []
        self._stopping = False
        self._ends_at_once = self._never_met = False
        if self._received is None:
            self._deadline = float("inf")
        self._notes = StartedRanks(error_dir)
        self._stalls = Stalls(self._notes)
        self._stall: Stall | None = None

    def spare(self, pid: int) -> None:
        """Leave a child alone that is no rank."""
        self._others.add(pid)

    def pause(self, seconds: float = math.inf, until: Callable[[], bool] = lambda: False) -> Verdict | None:
        """Wait, with no rank running; return how all ends where this process is told to end meanwhile, else None."""
        end = time.monotonic() + seconds
        while self._received is None and not until() and (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
        if self._received is None:
            return None
        if self._received is signal.SIGINT:
            return Verdict(INTERRUPTED, "interrupted", failed=True)
        text = "ended by SIGTERM before the ranks were started; run the same command again"
        return Verdict(Preempted.exit_code, text, failed=True)

    def add(self, process: Process) -> None:
        """Take a rank that was just started under watch."""
        self._ranks.append(_Rank(len(self._ranks), process))
        if self._received is not None:
            self._ranks[-1].send(self._received)

    def watch(self, is_held_up: Callable[[], bool] = lambda: False) -> Verdict:
        """Return how the ranks ended, once all have; when one fails, the others are ended.

        While they are held up from outside, nobody is taken for stalled.
        """
        while self._poll():
            if self._has_failure():
                self._let_settle()
                self.stop()
            elif self._is_overdue():
                self.stop()
            elif not is_held_up() and self._has_stalled():
                # Nothing that is stuck, or waits for that, could act on SIGTERM.
                self._kill()
            else:
                time.sleep(POLL_SECONDS)
        verdict = self._verdict()
        if verdict.failed:
            self.end_strays()
        return verdict

    def stop(self) -> None:
        """End all ranks: SIGTERM, and soon SIGKILL."""
        self._stopping = True
        for rank in self._ranks:
            # One that is on its way out is left to end with an exit code of its own.
            if rank.code is None and not self._is_ending(rank):
                rank.was_signalled = True
                rank.send(signal.SIGTERM)
        self._wait(TERMINATE_SECONDS, lambda: False)
        self._kill()

    def _kill(self) -> None:
        self._stopping = True
        for rank in self._ranks:
            if rank.code is None:
                rank.was_signalled = rank.was_killed = True
                rank.send(signal.SIGKILL)
        self._wait(float("inf"), lambda: False)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass what this process is told to the ranks, for as long as the context lasts. In the main thread only."""
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        handlers = {signum: signal.getsignal(signum) for signum in signals}
        # A shell that starts a job in the background has it ignore SIGINT, and so it should stay.
        taken = [signum for signum in signals if handlers[signum] is not signal.SIG_IGN]
        # Ignored, or with a handler that waits for children, it would lose how ranks ended.
        on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for signum in taken:
            signal.signal(signum, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, on_child)
            for signum in taken:
                signal.signal(signum, handlers[signum])

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT:
            if self._received is signal.SIGINT:
                self._ends_at_once = True
                return
            self._received, self._deadline = signal.SIGINT, now + PREEMPT_SECONDS
        elif signum == signal.SIGTERM and self._received is None:
            self._received, self._deadline = signal.SIGTERM, now + PREEMPT_SECONDS
        for rank in self._ranks:
            rank.send(signum)

    def _poll(self) -> bool:
        """Look at all ranks; return whether any still runs."""
        for rank in self._ranks:
            running = rank.code is None
            rank.poll()
            if running and rank.code is not None:
                self._on_end(rank, rank.code)
        return any(rank.code is None for rank in self._ranks)

    def _on_end(self, rank: _Rank, code: int) -> None:
        if code == Preempted.exit_code:
            # All stop at one step; one of them may still be writing the checkpoint.
            self._deadline = min(self._deadline, time.monotonic() + PREEMPT_SECONDS)
        told = code == Preempted.exit_code or (self._received is signal.SIGTERM and code == -signal.SIGTERM)
        if told and not rank.was_signalled and not has_met(self._error_dir, rank.rank):
            # The others would wait for it where ranks meet, or fail there, and have nothing to save yet.
            self._ends_at_once = self._never_met = True
        if code < 0 and self._is_bad(rank):
            caused_by_us = rank.was_killed and -code == signal.SIGKILL
            if not caused_by_us and (not self._stopping or -code in _CRASHES):
                self._crashed.append(rank)

    def _is_bad(self, rank: _Rank) -> bool:
        """Whether ``rank`` ended, and in a way that ends the run."""
        if rank.code is None or rank.code in (0, Preempted.exit_code) or self._received is signal.SIGINT:
            return False
        return self._received is None or rank.code not in (-signal.SIGTERM, 128 + signal.SIGTERM)

    def _has_failure(self) -> bool:
        if self._received is signal.SIGINT:
            return False
        return any(self._is_bad(rank) for rank in self._ranks) or bool(self._failures())

    def _is_overdue(self) -> bool:
        """Whether ranks that were told to end have had their time. Within a stage its sections' limits are theirs: a
        validation is finished first, and a save takes as long as it takes."""
        if self._ends_at_once or self._deadline == math.inf:
            return self._ends_at_once
        beats = self._notes.beats(self._running())
        if any(beat is not None and beat.section != OUTSIDE for beat in beats.values()):
            self._deadline = time.monotonic() + PREEMPT_SECONDS
        return time.monotonic() >= self._deadline

    def _has_stalled(self) -> bool:
        self._stall = self._stalls.look(self._running())
        return self._stall is not None

    def _running(self) -> dict[int, int]:
        """Return the ranks that still run, and their pids."""
        return {rank.rank: rank.process.pid for rank in self._ranks if rank.code is None}

    def _failures(self) -> list[Failure]:
        """Return what the ranks recorded, first failure first, without those that were only preempted."""
        found = [self._failure_of(rank) for rank in self._ranks]
        failures = [failure for failure in found if failure and failure.exit_code != Preempted.exit_code]
        return sorted(failures, key=lambda failure: failure.seconds)

    def _failure_of(self, rank: _Rank) -> Failure | None:
        """Return what ended a rank, at the time when it met it: others fail of what it does on its way out."""
        recorded = read_failure(self._error_dir, rank.rank)
        trouble = read_trouble(self._error_dir, rank.rank)
        if recorded is None and (rank.code == 0 or (rank.code is None and not self._lingers(rank, trouble))):
            return None
        if recorded is None or trouble is None:
            return recorded or trouble
        return replace(recorded, seconds=min(recorded.seconds, trouble.seconds))

    def _lingers(self, rank: _Rank, trouble: Failure | None) -> bool:
        """Whether a rank that met an error does not get through what it does of it."""
        if trouble is None or time.monotonic() - trouble.seconds < FAREWELL_SECONDS:
            return False
        beat = self._last_beat(rank)
        return beat is not None and SECTIONS[beat.section] == "teardown"

    def _let_settle(self) -> None:
        """Wait until it shows who failed first: ranks that run their exit handlers end, and a crash is seen."""
        self._wait(EXIT_HANDLER_SECONDS, lambda: not any(self._is_ending(rank) for rank in self._ranks))
        self._wait(SETTLE_SECONDS, lambda: False)

    def _is_ending(self, rank: _Rank) -> bool:
        if rank.code is not None:
            return False
        return any(read(self._error_dir, rank.rank) is not None for read in (read_failure, read_trouble, read_leaving))

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while self._poll() and not is_over() and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 2)

    def _verdict(self) -> Verdict:
        """Name the rank at fault: a crash beats a traceback, for the others only saw it; then the first failure."""
        if self._received is signal.SIGINT:
            return Verdict(INTERRUPTED, "interrupted", failed=True)
        failures = self._failures()
        # Where one rank failed and hangs on its way out, that is what the others wait for.
        if self._stall is not None and not failures:
            rank = self._ranks[self._stall.ranks[0]]
            step = _step_of(self._last_beat(rank))
            return Verdict(StalledError.exit_code, self._stall.message, failed=True, step=step, rank=rank.rank)
        if self._crashed:
            rank = min(self._crashed, key=lambda rank: rank.ended_at)
            signum = -(rank.code or 0)
            if signum in _PREEMPTING and not self._anyone_met():
                return Verdict(
                    Preempted.exit_code,
                    f"{rank} was ended by {_signal_name(signum)} as it started; run the same command again",
                    failed=True,
                )
            return self._blame(rank, 128 + signum, f"{rank} was killed by {_signal_name(signum)}")
        if self._never_met:
            return self._verdict_without_failure()
        silent = self._first_silent({failure.rank for failure in failures})
        if silent and (not failures or self._left_at(silent) < failures[0].seconds):
            code = silent.code or 0
            how = f"ended with exit code {code}" if code > 0 else "left the others, and had to be killed"
            return self._blame(silent, max(code, 1), f"{silent} {how}")
        if failures:
            first = failures[0]
            if (quitter := self._first_to_quit(first.seconds)) is not None:
                text = f"rank {quitter.rank} (pid {quitter.pid}) left the others with exit code 0"
                return self._blame(self._ranks[quitter.rank], first.exit_code, text, quitter)
            if all(failure.exit_code == INTERRUPTED for failure in failures):
                return Verdict(INTERRUPTED, "interrupted", failed=True)
            # What they agreed on; the message says whose fault it is.
            together = len(failures) == len(self._ranks) > 1 and len({(one.kind, one.message) for one in failures}) == 1
            text = "all ranks failed" if together else f"rank {first.rank} (pid {first.pid}) failed"
            return self._blame(self._ranks[first.rank], first.exit_code, text, first)
        return self._verdict_without_failure()

    def _blame(self, rank: _Rank, exit_code: int, text: str, failure: Failure | None = None) -> Verdict:
        """Return the verdict that ``rank`` is at fault, and where in the training that was."""
        trace = "" if failure is None else f":\n{(failure.brief or failure.traceback).rstrip()}"
        beat = self._last_beat(rank)
        where = f"{text} {beat.where}".rstrip() if beat is not None else text
        whole = "" if failure is None else failure.traceback
        return Verdict(exit_code, f"{where}{trace}", failed=True, step=_step_of(beat), rank=rank.rank, traceback=whole)

    def _last_beat(self, rank: _Rank) -> Beat | None:
        return self._notes.beats({rank.rank: rank.process.pid})[rank.rank]

    def _first_silent(self, recorded: set[int]) -> _Rank | None:
        """Return the first rank that ended, or began to, of its own accord and without an exception."""
        unexplained = [rank for rank in self._ranks if self._is_bad(rank) and rank.rank not in recorded]
        ended = [rank for rank in unexplained if not rank.was_signalled or self._left_at(rank)]
        return min(ended, key=lambda rank: (self._left_at(rank), rank.ended_at), default=None)

    def _first_to_quit(self, before: float) -> Failure | None:
        """Return the ``SystemExit`` with which a rank ended well by itself in a stage, before others failed of that."""
        troubles = [read_trouble(self._error_dir, rank.rank) for rank in self._ranks if rank.code == 0]
        quits = [one for one in troubles if one is not None and one.kind == "SystemExit" and one.seconds < before]
        return min(quits, key=lambda one: one.seconds, default=None)

    def _left_at(self, rank: _Rank) -> float:
        """Return when ``rank`` began to leave; before all else if it did not say so, as after ``os._exit``."""
        return read_leaving(self._error_dir, rank.rank) or 0.0

    def _verdict_without_failure(self) -> Verdict:
        late = [str(rank) for rank in self._ranks if rank.was_signalled]
        overdue = f"; {', '.join(late)} did not end in time and had to be killed" if late else ""
        if any(rank.code == Preempted.exit_code for rank in self._ranks):
            found = [read_failure(self._error_dir, rank.rank) for rank in self._ranks]
            told = [one.message for one in found if one is not None and one.exit_code == Preempted.exit_code]
            message = next(filter(None, told), "preempted")
            return Verdict(Preempted.exit_code, message + overdue, failed=True)
        if any(rank.code != 0 for rank in self._ranks):
            if not self._anyone_met():
                text = "ended by SIGTERM as the ranks started; run the same command again"
                return Verdict(Preempted.exit_code, text, failed=True)
            return Verdict(128 + signal.SIGTERM, "ended by SIGTERM" + overdue, failed=True)
        return Verdict(0, "", failed=False)

    def _anyone_met(self) -> bool:
        """Whether the ranks came so far that something can be lost."""
        return any(has_met(self._error_dir, rank.rank) for rank in self._ranks)

    def end_strays(self) -> None:
        """Kill children that are neither ranks nor others': what failed ranks left running, such as workers."""
        known = self._others | {rank.process.pid for rank in self._ranks if rank.code is None}
        for _ in range(50 if self._adopts_orphans else 0):
            # A rank's own children come to us once it is gone, theirs once they are.
            left = children() - known
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _step_of(beat: Beat | None) -> int | None:
    return None if beat is None or beat.step < 0 else beat.step


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
