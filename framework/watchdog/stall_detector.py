"""``StallDetector``: finds the rank that no longer makes progress, from the heartbeats of all ranks.

Stages of the detection, over consecutive calls of ``check``:

1. ``SilenceTracker`` reports the ranks with the least progress, for which all others wait, and their silences.
2. Shortly before a deadline passes (1.6 s before it, or half the limit if that is less) those ranks are inspected: in
   the first half of that time whether they use the CPU; in the second half, for those that do, whether their stacks
   change.
3. Once the deadline has passed, a rank that is stopped, or that neither makes progress nor waits for another rank, has
   stalled. A rank that computes is only slow, for example on a shared machine: its deadline is extended, up to ten
   times the limit, or 5 minutes if that is more. A rank in a debugger has no deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .heartbeat import HeartbeatReader, HeartbeatRecord
from .silence import RankSilence, SilenceTracker
from .stack_dump import Stacks, process_state, read_stacks, work_seconds

# Fractions of the inspection: up to the first, CPU use is observed; up to the second, changes of the stacks.
_STACKS_FROM, _VERDICT_FROM = 0.5, 0.9
# Seconds between two requests of the same stacks.
_REQUEST_INTERVAL_SECONDS = 0.15
SAME_CALLS = (
    "Every rank must make the same calls: look for a condition on the rank around a layer of the model, a fit, a "
    "validate, a test or a predict, or around a forward pass or another collective in a hook."
)
"""The advice on ranks that wait for one another."""
# Seconds of extension for a rank that waits for one that is not late yet, or for one further behind on another machine.
_SHORT_EXTENSION_SECONDS = 1.6
# The part of a core that an idle rank may use: threads of libraries wake up now and then.
_IDLE_CPU_FRACTION = 0.02


class RankSource(Protocol):
    """Ranks whose heartbeats and stacks can be read, identified by their pids."""

    def records(self, pids: Mapping[int, int]) -> dict[int, HeartbeatRecord | None]:
        """Return the latest record of each rank in ``pids``; None for a rank that has not begun."""

    def stacks(self, pids: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None]) -> dict[int, Stacks]:
        """Return the stacks of every rank in ``pids``; for a rank that does not answer, only its process state."""

    def another_is_behind(self) -> bool:
        """Whether a rank that this source cannot read has less progress."""


class SupervisedRanks:
    """The ranks that a supervisor has started, which write to its directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._readers: dict[int, HeartbeatReader] = {}

    def create(self, rank: int) -> None:
        """Create the memory of a rank that is being started."""
        self._readers[rank] = HeartbeatReader(self._directory, rank)
        self._readers[rank].create()

    def records(self, pids: Mapping[int, int]) -> dict[int, HeartbeatRecord | None]:
        """Return the latest record of each rank; None for a rank that has not begun."""
        for rank in pids:
            if rank not in self._readers:
                self._readers[rank] = HeartbeatReader(self._directory, rank)
        return {rank: self._readers[rank].read() for rank in pids}

    def stacks(self, pids: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None]) -> dict[int, Stacks]:
        """Return the stacks of every rank; for a rank that does not answer, only its process state."""
        return read_stacks(pids, records, {rank: reader.stacks for rank, reader in self._readers.items()})

    def another_is_behind(self) -> bool:
        """Return False: the supervisor reads all ranks."""
        return False


@dataclass(frozen=True)
class Stall:
    """The ranks that have stalled, and the message that names them."""

    ranks: tuple[int, ...]
    message: str


@dataclass
class SuspectedStall:
    """Observations of the ranks with the least progress while their deadline is near."""

    records: dict[int, HeartbeatRecord | None]
    since: float
    """Start of the inspection, in seconds of ``StallDetector.now``."""
    work: dict[int, float]
    """The CPU time of each rank at the start of the inspection, in seconds."""
    computing: set[int] = field(default_factory=set)
    stacks: dict[int, Stacks] | None = None
    """The latest stacks of the computing ranks."""
    asked_at: float = 0.0
    """Last request of stacks, in seconds of ``StallDetector.now``."""
    progressing: set[int] = field(default_factory=set)
    """The computing ranks whose stacks have changed."""

    def note_computing(self, pids: Mapping[int, int], now: float) -> None:
        """Record ranks that use the CPU or are in state R or D.

        On a busy machine these may get no core or disk during the inspection.
        """
        for rank, pid in pids.items():
            worked = work_seconds(pid) - self.work[rank]
            if process_state(pid) in ("R", "D") or worked > _IDLE_CPU_FRACTION * (now - self.since):
                self.computing.add(rank)

    def note_stacks(self, stacks: dict[int, Stacks], now: float) -> None:
        """Record the ranks whose stacks have changed."""
        before = self.stacks or {}
        self.progressing |= {rank for rank in stacks if rank in before and _differ(before[rank], stacks[rank])}
        self.stacks, self.asked_at = {**before, **stacks}, now


class StallDetector:
    """Detects and describes a stall of ranks."""

    def __init__(self, source: RankSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._tracker = SilenceTracker(clock)
        self._suspected: SuspectedStall | None = None

    @property
    def now(self) -> float:
        """Seconds since the first check; of each gap between two checks at most 1 s counts."""
        return self._tracker.now

    def check(self, pids: Mapping[int, int]) -> Stall | None:
        """Return the stall of the running ranks, given by their pids, or None.

        Takes up to 1.2 seconds: stacks may be requested twice, 0.6 s each.
        """
        records = self._source.records(pids)
        behind = self._tracker.update(records)
        suspects = [silence for silence in behind.values() if silence.is_suspected]
        if not suspects:
            # The usual case, 50 times a second: one comparison of a few bytes for each rank.
            self._suspected = None
            return None
        suspected = self._suspected = self._suspicion({rank: records[rank] for rank in behind}, pids)
        # From 0 to 1 in the time before the deadline, by the tracker's clock: a suspended watchdog does not inspect.
        elapsed = (self.now - suspected.since) / min(silence.suspicion_seconds for silence in suspects)
        self._inspect(suspected, elapsed, pids, records)
        if suspected.stacks is None or elapsed < _VERDICT_FROM or not any(silence.is_late for silence in suspects):
            return None
        # After any verdict the next suspicion begins with new observations.
        self._suspected = None
        computing = bool(suspected.stacks)
        stacks = self._source.stacks(pids, records)
        # A heartbeat during the inspection counts only if a rank computes: a sleeping rank may have been woken by
        # the signal that requested its stack.
        if computing and self._source.records(pids) != records:
            return None
        suspected.note_stacks(stacks, self.now)
        stalled = self._stalled_ranks(behind, suspected.progressing, stacks)
        return Stall(tuple(stalled), describe(stalled, behind, pids, records, stacks)) if stalled else None

    def _suspicion(self, records: dict[int, HeartbeatRecord | None], pids: Mapping[int, int]) -> SuspectedStall:
        """Return the observations so far; they begin again after any heartbeat."""
        # Only records of the ranks behind count: the others are silent because of them.
        if self._suspected is not None and self._suspected.records == records:
            return self._suspected
        return SuspectedStall(records, self.now, {rank: work_seconds(pids[rank]) for rank in records})

    def _inspect(
        self,
        suspected: SuspectedStall,
        elapsed: float,
        pids: Mapping[int, int],
        records: Mapping[int, HeartbeatRecord | None],
    ) -> None:
        if suspected.stacks is None:
            suspected.note_computing({rank: pids[rank] for rank in suspected.records}, self.now)
            # No stack is requested from a sleeping rank before the verdict: the signal might interrupt its sleep.
            if elapsed <= _STACKS_FROM:
                return
        elif elapsed >= _VERDICT_FROM or self.now - suspected.asked_at <= _REQUEST_INTERVAL_SECONDS:
            return
        # Requested several times: a short loop is often found at the same line twice.
        asked = {rank: pids[rank] for rank in suspected.computing - suspected.progressing}
        suspected.note_stacks(self._source.stacks(asked, records), self.now)

    def _stalled_ranks(
        self, behind: Mapping[int, RankSilence], progressing: set[int], stacks: Mapping[int, Stacks]
    ) -> list[int]:
        """Return the ranks that have stalled; if there are none, extend the deadlines of those that are late."""
        late = [rank for rank, silence in behind.items() if silence.is_late]
        debugged = any(stacks[rank].is_debugged for rank in behind)
        # Any stopped rank is a cause, even with more progress: it may hold a lock, or serve the store.
        stopped = [rank for rank, each in stacks.items() if each.is_stopped]
        # Beyond the longest extension even a rank that computes has stalled: its loop may never end.
        working = [rank for rank in progressing if behind[rank].seconds < behind[rank].longest]
        # A waiting rank is not at fault if another rank with the same progress does not wait.
        stuck = [rank for rank in late if rank not in working and not stacks[rank].waits]
        if not debugged and not self._source.another_is_behind():
            if stopped or stuck:
                return stopped or stuck
            if not working and all(silence.seconds >= silence.limit for silence in behind.values()):
                # All ranks wait for one another: a deadlock, in which no single rank is at fault. Not by deadlines that
                # were extended: two ranks would be late in turn for ever.
                return list(behind)
        for rank in {*late, *working}:
            deadline = math.inf if debugged else _extended(behind[rank], bool(working))
            self._tracker.extend_deadline(rank, deadline)
        return []


def _extended(silence: RankSilence, is_working: bool) -> float:
    if is_working:
        return min(silence.seconds + silence.limit, silence.longest)
    # The rank waits for one that is not late yet and whose own deadline follows soon.
    return silence.seconds + _SHORT_EXTENSION_SECONDS


def _differ(before: Stacks, after: Stacks) -> bool:
    """Whether a rank that computes makes progress, judged by its stacks."""
    # Doubtful cases count as progress: a false alarm ends a healthy run, while a late alarm costs minutes.
    # A runnable rank that does not answer was not scheduled on a core.
    starved = after.state == "R" and not after.frames
    return before.frames != after.frames or after.collects_garbage or starved


def describe(
    stalled: list[int],
    behind: Mapping[int, RankSilence],
    pids: Mapping[int, int],
    records: Mapping[int, HeartbeatRecord | None],
    stacks: Mapping[int, Stacks],
) -> str:
    """Return the message of a stall: the stacks of all ranks, the stalled ones last, and a sentence that names them."""
    # The stalled ranks are printed last, where they are visible in a terminal.
    lines = show_stacks([rank for rank in pids if rank not in stalled], pids, stacks)
    for rank in stalled:
        lines += [f"{named([rank], pids)}:", str(stacks[rank])]
        if threads := stacks[rank].threads():
            lines.append(threads)
    return "\n".join([*lines, _sentence(stalled, behind, pids, records[stalled[0]], stacks[stalled[0]])])


def show_stacks(ranks: Sequence[int], pids: Mapping[int, int], stacks: Mapping[int, Stacks]) -> list[str]:
    """Return the first lines of a message about a stall: the stacks of some ranks. Equal ones are shown once."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(str(stacks[rank]), []).append(rank)
    lines = ["the run has stalled. What each rank was doing, the innermost call first:"]
    for text, members in groups.items():
        waits = " (waiting for others)" if stacks[members[0]].waits else ""
        lines += [f"{named(members, pids)}{waits}:", text]
    return lines


def _sentence(
    stalled: list[int],
    behind: Mapping[int, RankSilence],
    pids: Mapping[int, int],
    record: HeartbeatRecord | None,
    stacks: Stacks,
) -> str:
    # A stopped rank may be ahead of the others: then the time is that for which they have waited for it.
    silence = behind.get(stalled[0]) or max(behind.values(), key=lambda silence: silence.seconds)
    state = " (stopped by a signal)" if stacks.is_stopped else " (waiting for another rank)" if stacks.waits else ""
    learned = ", learned from this run" if silence.learned else ""
    advice = f"{SAME_CALLS} " if stacks.waits and len(stalled) > 1 else ""
    return (
        f"{named(stalled, pids)} stalled{state}: no heartbeat for {silence.seconds:.1f} s "
        f"{record or 'before fit'}; the limit is {silence.limit:.4g} s{learned}. "
        f"{advice}If it only needs longer there, give Trainer(stall_timeout=...) more seconds."
    )


def named(ranks: Sequence[int], pids: Mapping[int, int]) -> str:
    """Return ranks as text, a single one with its pid."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} (pid {pids[ranks[0]]})"
    return f"ranks {', '.join(map(str, ranks[:16]))}{' ...' if len(ranks) > 16 else ''}"
