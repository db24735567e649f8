"""``SilenceTracker``: the time for which each rank has shown no heartbeat, and its limit.

A rank that waits for another one is silent too. So only the ranks with the least progress are reported, as all others
wait for them. A limit that the user did not give is learned: ten times the longest silence in the section in this run,
and more while few heartbeats have been seen there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .heartbeat import LEARNED, OUTSIDE, SECTIONS, HeartbeatRecord

# A learned limit is FIRST_SECONDS before the first heartbeat, and after n heartbeats at least an n-th of it.
# So the first compilation and the first save have 25 minutes. It is less than the 30 minutes after which collectives on
# gloo fail with an error that names no rank.
FIRST_SECONDS = 1500.0
LEAST_SECONDS = 60.0
FACTOR = 10.0
# A watchdog that is called less often than this was itself suspended, as all of a job is by Ctrl-Z or by a machine that
# sleeps: that time must not count as the ranks' silence, or all of them would be late when the job continues.
_LONGEST_TICK_SECONDS = 1.0
_SUSPICION_SECONDS = 1.6
_LEAST_EXTENSION_SECONDS = 300.0


@dataclass
class _Silence:
    """The time since which a rank has shown the same record; ``deadline`` is an extension granted to it."""

    record: HeartbeatRecord | None
    since: float
    deadline: float = 0.0


@dataclass
class _Section:
    """The heartbeats seen in a section, on all ranks."""

    signs: int = 0
    longest: float = 0.0

    @property
    def limit(self) -> float:
        # The last term falls with each heartbeat, so a section that is entered often soon has a tight limit.
        return max(LEAST_SECONDS, FACTOR * self.longest, FIRST_SECONDS / (1 + self.signs))


@dataclass(frozen=True)
class RankSilence:
    """The silence of a rank that others wait for, in seconds, and the limits that hold for it."""

    seconds: float
    limit: float
    learned: bool
    deadline: float
    """The limit, or the extension granted to the rank."""

    @property
    def suspicion_seconds(self) -> float:
        """The time before the deadline in which the rank is inspected, to distinguish slow ranks from stalled ones."""
        return min(_SUSPICION_SECONDS, self.limit / 2)

    @property
    def longest(self) -> float:
        """The longest permitted silence of a rank that is computing."""
        return max(_LEAST_EXTENSION_SECONDS, FACTOR * self.limit)

    @property
    def is_suspected(self) -> bool:
        """Whether the deadline is near."""
        return self.seconds > self.deadline - self.suspicion_seconds

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.seconds > self.deadline


@dataclass
class SilenceTracker:
    """Measures silences from one update to the next. Time during which the watchdog was suspended does not count."""

    clock: Callable[[], float] = time.monotonic
    now: float = 0.0
    """The seconds that have counted so far."""
    _last: float | None = None
    _silences: dict[int, _Silence] = field(default_factory=dict)
    _sections: list[_Section] = field(default_factory=lambda: [_Section() for _ in SECTIONS])

    def update(self, records: Mapping[int, HeartbeatRecord | None]) -> dict[int, RankSilence]:
        """Process the records of the running ranks; return the silences of those with the least progress."""
        now = self.clock()
        self.now += min(_LONGEST_TICK_SECONDS, now - self._last) if self._last is not None else 0.0
        self._last = now
        # Ranks that have ended are missing from `records`: their silences remain, but are not read.
        for rank, record in records.items():
            self._take_in(rank, record)
        inside = {rank for rank, record in records.items() if record is not None and record.section != OUTSIDE}
        if not inside:
            # Every rank runs the user's own code, which has no limit.
            return {}
        # The silence of a rank outside of all sections starts at the moment at which another rank waits for it.
        waited = max(self._seconds(rank) for rank in inside)
        least = min(_progress(record) for record in records.values())
        return {
            rank: RankSilence(min(self._seconds(rank), math.inf if rank in inside else waited), *self._limits(rank))
            for rank, record in records.items()
            if _progress(record) == least
        }

    def extend_deadline(self, rank: int, seconds: float) -> None:
        """Extend the deadline of a rank by ``seconds``, until its next heartbeat."""
        self._silences[rank].deadline = seconds

    def _take_in(self, rank: int, record: HeartbeatRecord | None) -> None:
        silence = self._silences.get(rank)
        if silence is not None and (silence.record is record or silence.record == record):
            return
        if silence is not None and silence.record is not None:
            # Credited to the section that the rank was silent in, not to the one that it has entered. Silences of all
            # ranks teach one limit: a rank that is slow once must not be alone in knowing it.
            section = self._sections[silence.record.section]
            section.signs += 1
            section.longest = max(section.longest, self.now - silence.since)
        self._silences[rank] = _Silence(record, self.now)

    def _seconds(self, rank: int) -> float:
        return self.now - self._silences[rank].since

    def _limits(self, rank: int) -> tuple[float, bool, float]:
        """Return the rank's limit, whether it was learned, and its deadline."""
        silence = self._silences[rank]
        # Before its first stage, or in the user's own code, a rank has no limit of its own; one that others wait for
        # must arrive within 25 minutes all the same, or the run would hang forever.
        if silence.record is None or silence.record.section == OUTSIDE:
            return FIRST_SECONDS, False, max(FIRST_SECONDS, silence.deadline)
        # The limits are part of the heartbeat, as each stage of each Trainer may have its own.
        given = silence.record.limits[silence.record.section]
        limit = self._sections[silence.record.section].limit if given == LEARNED else given
        return limit, given == LEARNED, max(limit, silence.deadline)


def _progress(record: HeartbeatRecord | None) -> tuple[int, int]:
    return (0, 0) if record is None else record.progress
