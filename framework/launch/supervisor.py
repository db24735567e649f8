"""``Supervisor``: watches the ranks of one machine, and ends all of them when one fails.

Sequence of events when one rank dies:

1. ``watch`` polls every 20 ms and sees a bad exit code, or an error that a rank recorded (system/failure_records.py).
2. ``_wait_for_cause`` gives exiting ranks 0.4 s to run their exit handlers, and 0.05 s more for a crash to show, so
   that the cause is known before the supervisor sends signals.
3. ``stop`` sends SIGTERM to the others, and SIGKILL 0.8 s later. The sum of all steps stays below 2 s.
4. ``judge`` (verdict.py) names the rank at fault. Processes that ranks left running, such as loader workers, are
   killed.
5. The launcher shows the message and ends with its exit code, or restarts the ranks (script_launcher.py).

On Linux the kernel kills the ranks when the supervisor ends, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from ..core.errors import Preempted
from ..system.failure_records import INTERRUPTED
from ..system.processes import Process, adopt_orphans, children
from ..watchdog.stall_detector import Stall, StallDetector
from ..watchdog.waiting_ranks import WaitingRanks
from .attempt import Attempt
from .verdict import Verdict, judge

POLL_SECONDS = 0.02
# Seconds in which a crash on another rank may still show after a failure was seen: ending a process that dumps core
# takes the kernel longer than a broken connection takes to raise an exception elsewhere. Without this wait the
# consequence would be reported as the cause.
CRASH_SECONDS = 0.05
# Seconds for the exit handlers of a rank that has recorded its error or is exiting.
EXIT_HANDLER_SECONDS = 0.4
# Seconds from SIGTERM to SIGKILL after a failure. With the two times above, all ranks have ended within 2 s.
TERMINATE_SECONDS = 0.8
# Seconds that preempted ranks may take outside of the sections of a stage, which have limits of their own.
PREEMPT_SECONDS = 30.0
_MOST_GENERATIONS = 50

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Watches the ranks of one machine. Ranks are added in order as they start; ``begin_attempt`` removes them.

    With ``adopts_orphans``, processes that dead ranks leave running become children of this process, which kills them
    after a failure. Without it they would keep ports and device memory that the restarted ranks need.
    """

    def __init__(self, directory: str, adopts_orphans: bool = False) -> None:
        self._adopts_orphans = adopts_orphans and sys.platform == "linux"
        self._others: set[int] = set()
        """Pids of children that are never killed."""
        self._deadline = math.inf
        """``time.monotonic()`` at which preempted ranks are stopped; inf: no deadline; -inf: now."""
        self._attempt = Attempt(directory)
        self.has_to_leave = False
        """Whether Ctrl-C came twice: nothing is waited for any more."""
        self._stall: Stall | None = None
        self._detector = StallDetector(self._attempt.heartbeats)
        self._waiting = WaitingRanks(self._attempt.heartbeats)
        if self._adopts_orphans:
            # Children that the script started earlier must survive its ranks.
            self._others = children()
            adopt_orphans()

    @property
    def is_shutting_down(self) -> bool:
        """Whether this process received SIGINT or SIGTERM."""
        return self._attempt.received is not None

    @property
    def has_crashed(self) -> bool:
        """Whether a rank of the attempt died of a signal that the supervisor did not send."""
        return bool(self._attempt.crashed)

    def begin_attempt(self, directory: str, first_rank: int = 0) -> None:
        """Remove the ranks that have ended; the next, from ``first_rank``, write their records into ``directory``."""
        before, self._attempt = self._attempt, Attempt(directory, first_rank)
        if before.received is not None:
            # Read after the new attempt is in place: a signal that arrives in between must not be lost.
            self._attempt.received = before.received
        self._stall = None
        # Limits are learned again: after a restart the first steps are slow, as they compile and fill caches.
        self._detector = StallDetector(self._attempt.heartbeats)
        self._waiting = WaitingRanks(self._attempt.heartbeats)
        if not self.is_shutting_down:
            self._deadline = math.inf

    @property
    def running(self) -> dict[int, int]:
        """The ranks that are running, and their pids."""
        return self._attempt.running

    def spare(self, pid: int) -> None:
        """Never kill this child, which is not a rank."""
        self._others.add(pid)

    def pause(self, seconds: float = math.inf, until: Callable[[], bool] = lambda: False) -> Verdict | None:
        """Wait while no rank is running; return a verdict if a shutdown signal arrives first, else None."""
        end = time.monotonic() + seconds
        while not self.is_shutting_down and not until() and (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
        if not self.is_shutting_down:
            return None
        if self._attempt.received is signal.SIGINT:
            return Verdict(INTERRUPTED, "interrupted", failed=True)
        text = "ended by SIGTERM before the ranks were started; run the same command again"
        return Verdict(Preempted.exit_code, text, failed=True)

    def add(self, process: Process) -> None:
        """Watch a rank that was just started."""
        self._attempt.add(process)

    def watch(
        self,
        is_output_blocked: Callable[[], bool] = lambda: False,
        others_ended: Callable[[], int | None] = lambda: None,
        report_failure: Callable[[], None] = lambda: None,
        has_to_save: Callable[[], bool] = lambda: False,
    ) -> Verdict:
        """Wait until all ranks have ended, and return the verdict; when one fails, end the others.

        Args:
            is_output_blocked: while it returns True, for example for a pager that does not read, silent ranks do not
                count as stalled: they wait for the screen.
            others_ended: returns the exit code for which ranks of other nodes have ended, or None.
            report_failure: called as soon as a rank has failed, before the others are ended.
            has_to_save: whether the ranks are to save and end, as if they were preempted.
        """
        is_asked = False
        while self._poll():
            # Failures are checked first: an error on one rank explains the silence of the others, which wait for it.
            if self._has_failure():
                report_failure()
                self._wait_for_cause()
                self.stop()
            elif self._is_overdue() or self._others_failed(others_ended()):
                self.stop()
            elif not is_asked and has_to_save() and self._attempt.is_in_stage:
                is_asked = True
                for rank in self._attempt.ranks:
                    rank.send(signal.SIGTERM)
            elif not is_output_blocked() and self._has_stalled():
                # Python handlers do not run in a rank that hangs in a collective, so SIGTERM would have no effect.
                self._kill()
            else:
                time.sleep(POLL_SECONDS)
        verdict = judge(self._attempt, self._stall)
        # After success, processes that ranks left running are intended, such as a server for the results.
        if verdict.failed:
            self.kill_strays()
        return verdict

    def stop(self) -> None:
        """End all ranks: SIGTERM, and SIGKILL 0.8 s later to those still running. Returns when all have ended."""
        self._attempt.terminate()
        self._wait(TERMINATE_SECONDS)
        # A rank that ignores SIGTERM, or whose handler cannot run while it waits in a collective, ends only by SIGKILL.
        self._kill()

    def _kill(self) -> None:
        self._attempt.kill()
        self._wait(math.inf)

    @contextlib.contextmanager
    def handling_signals(self, signals: Sequence[signal.Signals] = _FORWARDED) -> Iterator[None]:
        """Within the context, forward these signals to the ranks, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signum: signal.getsignal(signum) for signum in signals}
        # A shell starts background jobs with SIGINT ignored, which must stay so: Ctrl-C is meant for another job.
        taken = [signum for signum in signals if handlers[signum] is not signal.SIG_IGN]
        # With SIGCHLD ignored, or a handler that waits for children, the exit codes of ranks would be lost.
        on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for signum in taken:
            signal.signal(signum, self._on_signal)
        # Python runs handlers in the main thread, between two instructions of `watch`, so no lock is needed.
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, on_child)
            for signum in taken:
                signal.signal(signum, handlers[signum])

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on. The ranks finish their step and save; a second Ctrl-C stops them immediately."""
        received = self._attempt.received
        if signum == signal.SIGINT and received is signal.SIGINT:
            self._deadline = -math.inf
            self.has_to_leave = True
            return
        # Ctrl-C after SIGTERM still interrupts; SIGTERM after Ctrl-C is only forwarded.
        if signum == signal.SIGINT or (signum == signal.SIGTERM and received is None):
            self._attempt.received = signal.Signals(signum)
            self._deadline = time.monotonic() + PREEMPT_SECONDS
        # Ctrl-C in a terminal has reached the ranks already; they count two within a second as one (signals.py).
        for rank in self._attempt.ranks:
            rank.send(signum)

    def _poll(self) -> bool:
        """Check all processes; return whether any rank is still running."""
        if any(rank.code == Preempted.exit_code for rank in self._attempt.poll()):
            # All ranks stop at the same step, but one of them may still be writing the checkpoint.
            self._deadline = min(self._deadline, time.monotonic() + PREEMPT_SECONDS)
        if self._attempt.never_met:
            # The others would wait for the preempted rank in the rendezvous, and have nothing to save yet.
            self._deadline = -math.inf
        return bool(self._attempt.running)

    def _has_failure(self) -> bool:
        # After Ctrl-C ranks end with errors of all kinds. None of them is a reason to kill the others, which may be
        # saving.
        if self._attempt.received is signal.SIGINT:
            return False
        # A recorded error counts before its rank has ended, as the rank may hang in an exit handler.
        return any(self._attempt.has_failed(rank) for rank in self._attempt.ranks) or bool(self._attempt.failures())

    def _is_overdue(self) -> bool:
        """Whether preempted ranks have exceeded their time.

        Inside a stage the limits of its sections apply instead: a validation is finished first, and the time of a save
        depends on the size of the checkpoint.
        """
        if math.isfinite(self._deadline) and self._attempt.is_in_stage:
            self._deadline = time.monotonic() + PREEMPT_SECONDS
        return time.monotonic() >= self._deadline

    def _others_failed(self, code: int | None) -> bool:
        """Whether ranks of other nodes have failed. If they were preempted, those of this node get the usual time."""
        if code in (Preempted.exit_code, INTERRUPTED):
            self._deadline = min(self._deadline, time.monotonic() + PREEMPT_SECONDS)
            return False
        return code is not None

    def _has_stalled(self) -> bool:
        running, ended = self._attempt.running, self._attempt.ended_well
        waiting = self._waiting.check(running, ended, has_signal=self.is_shutting_down)
        self._stall = waiting or self._detector.check(running)
        return self._stall is not None

    def _wait_for_cause(self) -> None:
        """Wait until the rank that failed first is known: exiting ranks have ended, and a crash has been seen."""
        self._wait(EXIT_HANDLER_SECONDS, lambda: not any(map(self._attempt.is_exiting, self._attempt.ranks)))
        self._wait(CRASH_SECONDS)

    def _wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        # Polls instead of waiting for one process: `_poll` also records the order in which the ranks end.
        until = time.monotonic() + seconds
        while self._poll() and not is_over() and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 2)

    def kill_strays(self) -> None:
        """Kill children that are neither ranks nor spared: processes that failed ranks left running.

        No effect without ``adopts_orphans``, nor outside Linux.
        """
        known = self._others | set(self._attempt.running.values())
        # Children of a rank become children of this process when the rank ends, and their children when they end:
        # repeat until none is left.
        for _ in range(_MOST_GENERATIONS if self._adopts_orphans else 0):
            strays = children() - known
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
