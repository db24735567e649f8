"""``Attempt``: the ranks of one start, with the process, the records and the heartbeat of each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace

from ..core.errors import Preempted
from ..system.failure_records import Failure, RankRecords
from ..system.processes import Process
from ..watchdog.heartbeat import OUTSIDE, SECTIONS, HeartbeatRecord
from ..watchdog.stall_detector import SupervisedRanks

# Time limit for callbacks and loggers of a rank after an error: they may wait for ranks that have ended.
TEARDOWN_SECONDS = 20.0
# Signals of a crash. A rank that dies of one while the supervisor ends it may still be the cause of the failure.
_CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


@dataclass
class RankProcess:
    rank: int
    process: Process
    code: int | None = None
    """The exit code, negative for a signal; None while the process runs."""
    ended_at: float = 0.0
    was_signalled: bool = False
    """Whether the supervisor ended the process because of another rank, by SIGTERM or SIGKILL."""
    was_killed: bool = False

    def poll(self) -> bool:
        """Check the process; return whether it has ended since the last call."""
        if self.code is not None or (code := self.process.poll()) is None:
            return False
        # The time at which the end was noticed, up to 20 ms late: it orders crashes, which leave no record.
        self.code, self.ended_at = code, time.monotonic()
        return True

    def send(self, signum: int) -> None:
        """Send a signal if the process is running."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)

    def end(self, signum: signal.Signals) -> None:
        """End the process because of another rank, by SIGTERM or SIGKILL."""
        if self.code is None:
            self.was_signalled = True
            self.was_killed = signum is signal.SIGKILL
            self.send(signum)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"


class Attempt:
    """The ranks of one start on this node, from ``first_rank``; they write their records into ``directory``."""

    def __init__(self, directory: str, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self.received: signal.Signals | None = None
        """The shutdown signal that the supervisor itself received."""
        self.records = RankRecords(directory)
        self.heartbeats = SupervisedRanks(directory)
        self.ranks: list[RankProcess] = []
        self.crashed: list[RankProcess] = []
        """The ranks that died of a signal that the supervisor did not send, in the order of detection."""
        self.never_met = False
        """Whether a rank was preempted before it joined the process group, which then never becomes complete."""
        self._is_stopping = False

    def add(self, process: Process) -> None:
        """Add a rank that was just started."""
        rank = RankProcess(self._first_rank + len(self.ranks), process)
        self.ranks.append(rank)
        self.heartbeats.create(rank.rank)
        if self.received is not None:
            # The signal arrived while ranks were being started: this rank has not received it.
            rank.send(self.received)

    def find(self, rank: int) -> RankProcess:
        return self.ranks[rank - self._first_rank]

    def poll(self) -> list[RankProcess]:
        """Check all processes; return the ranks that have ended since the last call."""
        ended = [rank for rank in self.ranks if rank.poll()]
        for rank in ended:
            self._on_end(rank, rank.code or 0)
        return ended

    def terminate(self) -> None:
        """Send SIGTERM to all ranks except those that are already exiting."""
        self._is_stopping = True
        for rank in self.ranks:
            # A rank that is exiting keeps its own exit code, which may show the cause of the failure.
            if not self.is_exiting(rank):
                rank.end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all ranks."""
        self._is_stopping = True
        for rank in self.ranks:
            rank.end(signal.SIGKILL)

    def _on_end(self, rank: RankProcess, code: int) -> None:
        preempted = code == Preempted.exit_code or (self.received is signal.SIGTERM and code == -signal.SIGTERM)
        if preempted and not rank.was_signalled and not self.records.has_joined(rank.rank):
            # The others would wait or fail in the rendezvous, and have nothing to save yet.
            self.never_met = True
        if code < 0 and self.has_failed(rank):
            # While the supervisor ends ranks, a SIGTERM death is its own doing, but a segmentation fault is not: it may
            # be the cause, in a process that took longer to die than its peers took to detect it.
            by_supervisor = rank.was_killed and -code == signal.SIGKILL
            if not by_supervisor and (not self._is_stopping or -code in _CRASHES):
                self.crashed.append(rank)

    @property
    def running(self) -> dict[int, int]:
        """The ranks that are still running, and their pids."""
        return {rank.rank: rank.process.pid for rank in self.ranks if rank.code is None}

    @property
    def ended_well(self) -> dict[int, int]:
        """The ranks that have ended with exit code 0, and their pids."""
        return {rank.rank: rank.process.pid for rank in self.ranks if rank.code == 0}

    @property
    def any_joined(self) -> bool:
        """Whether any rank has joined the process group, so that work may be lost."""
        return any(self.records.has_joined(rank.rank) for rank in self.ranks)

    @property
    def is_in_stage(self) -> bool:
        """Whether a running rank is inside fit, validate, test or predict."""
        records = self.heartbeats.records(self.running).values()
        return any(record is not None and record.section != OUTSIDE for record in records)

    def has_failed(self, rank: RankProcess) -> bool:
        """Whether ``rank`` ended with a failure: not successfully, not preempted, not as requested by the user."""
        if rank.code is None or rank.code in (0, Preempted.exit_code) or self.received is signal.SIGINT:
            return False
        # After SIGTERM to the supervisor, ranks die of it or exit with the code to which a shell or a handler maps it.
        return self.received is None or rank.code not in (-signal.SIGTERM, 128 + signal.SIGTERM)

    def is_exiting(self, rank: RankProcess) -> bool:
        """Whether ``rank`` is still running but has begun to exit on its own."""
        if rank.code is not None:
            return False
        # Each of the three precedes the exit handlers, which may take a while: they flush files and end workers.
        records = self.records
        if any(read(rank.rank) is not None for read in (records.failure, records.pending_error, records.left_at)):
            return True
        # A rank that could write none of them, as on a full disk, is known to the ranks that wait for it.
        return any(failure.lost_rank == rank.rank for failure in self.failures())

    def failures(self) -> list[Failure]:
        """Return the errors that the ranks recorded, earliest first, without those of preempted ranks."""
        # Preempted ranks leave the user's script through an exception too, which is not an error.
        found = [self._failure(rank) for rank in self.ranks]
        failures = [failure for failure in found if failure and failure.exit_code != Preempted.exit_code]
        return sorted(failures, key=lambda failure: failure.seconds)

    def last_heartbeat(self, rank: RankProcess) -> HeartbeatRecord | None:
        """Return the latest record of ``rank``, also after its end; None if it never began a stage."""
        return self.heartbeats.records({rank.rank: rank.process.pid})[rank.rank]

    def _failure(self, rank: RankProcess) -> Failure | None:
        """Return the error of a rank, dated when it was raised: the clean-up after it makes other ranks fail."""
        recorded, pending = self.records.failure(rank.rank), self.records.pending_error(rank.rank)
        if recorded is None and (rank.code == 0 or (rank.code is None and not self._hangs_in_teardown(rank, pending))):
            # The error is only pending, so the user's code may have caught it, which is not a failure.
            return None
        if recorded is None or pending is None:
            return recorded or pending
        return replace(recorded, seconds=min(recorded.seconds, pending.seconds))

    def _hangs_in_teardown(self, rank: RankProcess, pending: Failure | None) -> bool:
        if pending is None or time.monotonic() - pending.seconds < TEARDOWN_SECONDS:
            return False
        record = self.last_heartbeat(rank)
        # Outside of the stage the error has been caught, and there is no time limit for the user's code.
        return record is not None and SECTIONS[record.section] == "teardown"
