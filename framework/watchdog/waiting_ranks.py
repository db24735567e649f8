"""``WaitingRanks``: finds ranks that wait in a collective for a rank that will never come, before any limit passes.

1. Another rank has ended with exit code 0. This breaks no connection where the others build a new process group, so
   they would wait for minutes.
2. The supervisor has received a signal, and every rank waits. Python runs no signal handler in a rank that waits in a
   collective, so none of them would end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from .heartbeat import OUTSIDE, HeartbeatRecord
from .stack_dump import work_seconds
from .stall_detector import SAME_CALLS, RankSource, Stall, named, show_stacks

# Seconds without any heartbeat: after a rank has ended, when the others may still be on their way to their own end, and
# after a signal, when they may be in a long collective.
ENDED_SECONDS = 5.0
SIGNAL_SECONDS = 30.0
# The part of a core that a waiting rank may use: it may poll. A rank in a long backward pass uses more.
_POLLING_CPU_FRACTION = 0.2


class WaitingRanks:
    """Checks whether all ranks that still run wait in a stage.

    Args:
        source: the ranks.
        clock: returns the time in seconds.
    """

    def __init__(self, source: RankSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._records: Mapping[int, HeartbeatRecord | None] = {}
        self._since = 0.0
        self._work: dict[int, float] = {}

    def check(self, running: Mapping[int, int], ended: Mapping[int, int], has_signal: bool) -> Stall | None:
        """Return the stall of the running ranks, or None. Takes up to 0.6 seconds, but only every few seconds.

        Args:
            running: the pid of each rank that is still running.
            ended: the pid of each rank that has ended with exit code 0.
            has_signal: whether the supervisor has received a signal that the ranks should end on.
        """
        if not running or not (ended or has_signal):
            return None
        records = self._source.records(running)
        inside = all(record is not None and record.section != OUTSIDE for record in records.values())
        if not inside or records != self._records:
            self._begin(running, records)
            return None
        seconds = self._clock() - self._since
        if seconds < (ENDED_SECONDS if ended else SIGNAL_SECONDS):
            return None
        work = max(work_seconds(pid) - self._work[rank] for rank, pid in running.items())
        stacks = self._source.stacks(running, records)
        waits = all(each.waits for each in stacks.values()) and work < _POLLING_CPU_FRACTION * seconds
        if not waits or self._source.records(running) != records:
            self._begin(running, records)
            return None
        lines = show_stacks(sorted(running), running, stacks)
        return Stall(tuple(sorted(running)), "\n".join([*lines, _sentence(running, ended, records, seconds)]))

    def _begin(self, running: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None]) -> None:
        self._records, self._since = records, self._clock()
        self._work = {rank: work_seconds(pid) for rank, pid in running.items()}


def _sentence(
    running: Mapping[int, int],
    ended: Mapping[int, int],
    records: Mapping[int, HeartbeatRecord | None],
    seconds: float,
) -> str:
    ranks = sorted(running)
    where = f"{named(ranks, running)} {'waits' if len(ranks) == 1 else 'wait'} for"
    position = f"{records[ranks[0]]}, without a heartbeat for {seconds:.0f} s. {SAME_CALLS}"
    if not ended:
        return f"ended by a signal: {where} another rank {position}"
    have = "has" if len(ended) == 1 else "have"
    return f"{named(sorted(ended), ended)} {have} ended with exit code 0, and {where} it {position}"
