"""``Stalls``: finds by what ranks note of themselves that one has stopped getting on, and which.

A rank that waits for another one is silent too. So only those are judged that all others wait for: the ranks that have
come least far. A limit that nobody gave is learned: ten times the longest silence that a section has shown, and more
while little of it was seen. A rank whose stack changes is at work, only slower than was thought, as on a machine that
others use too: its limit begins anew, up to ten times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .heartbeat import LEARNED, OUTSIDE, SECTIONS, Beat, BeatReader
from .stack_dump import Stacks, process_state, read_stacks, work_seconds

# The limit where nothing is known yet; after n signs of life in a section an n-th of it still holds.
FIRST_SECONDS = 1800.0
LEAST_SECONDS = 60.0
FACTOR = 10.0
# A watch that did not come to look for longer was itself stopped, as all of a job is by Ctrl-Z or a suspended machine.
_LONGEST_LOOK = 1.0
# Before a limit is over it is looked for so long whether ranks are at work: in the first half whether they compute, in
# the second, of those that do, whether their stacks change. Of a short limit it is half.
_DOUBT_SECONDS = 1.6
_LEAST_EXCUSE = 300.0
_ASK_SECONDS = 0.15
# The part of a core that a rank which sleeps may use.
_ASLEEP = 0.02


@dataclass
class _Silence:
    """How long a rank has noted the same; ``excused`` is a limit of its own, which it was granted for that."""

    beat: Beat | None
    since: float
    excused: float = 0.0


@dataclass
class _Section:
    """What was seen of a section, on all ranks."""

    signs: int = 0
    longest: float = 0.0

    @property
    def limit(self) -> float:
        return max(LEAST_SECONDS, FACTOR * self.longest, FIRST_SECONDS / (1 + self.signs))


@dataclass(frozen=True)
class Silent:
    """A rank that others wait for, if any, and how long it may be silent."""

    seconds: float
    limit: float
    learned: bool
    granted: float
    """The limit as far as it was extended."""

    @property
    def doubt_seconds(self) -> float:
        """How long before the limit is over it is looked closer."""
        return min(_DOUBT_SECONDS, self.limit / 2)

    @property
    def longest(self) -> float:
        """How long it may be silent if it is seen to work."""
        return max(_LEAST_EXCUSE, FACTOR * self.limit)

    @property
    def is_late(self) -> bool:
        """Whether the limit is over."""
        return self.seconds > self.granted


@dataclass
class StallWatch:
    """Looks at the ranks from time to time; in between, time passes only as far as it was there to see."""

    clock: Callable[[], float] = time.monotonic
    _last: float | None = None
    now: float = 0.0
    _silences: dict[int, _Silence] = field(default_factory=dict)
    _sections: list[_Section] = field(default_factory=lambda: [_Section() for _ in SECTIONS])

    def look(self, beats: Mapping[int, Beat | None]) -> dict[int, Silent]:
        """Take note of where the ranks that still run are; return those that have come least far."""
        now = self.clock()
        self.now += min(_LONGEST_LOOK, now - self._last) if self._last is not None else 0.0
        self._last = now
        for rank, beat in beats.items():
            self._note(rank, beat)
        inside = {rank for rank, beat in beats.items() if beat is not None and beat.section != OUTSIDE}
        if not inside:
            return {}
        least = min(_place(beat) for beat in beats.values())
        # Who is outside of all sections is missed since the others wait.
        waited = max(self._silence(rank) for rank in inside)
        return {
            rank: Silent(
                self._silence(rank) if rank in inside else min(waited, self._silence(rank)), *self._limit(rank)
            )
            for rank, beat in beats.items()
            if _place(beat) == least
        }

    def excuse(self, rank: int, seconds: float) -> None:
        """Let a rank be silent for so long, until it shows its next sign of life."""
        self._silences[rank].excused = seconds

    def _note(self, rank: int, beat: Beat | None) -> None:
        silence = self._silences.get(rank)
        if silence is not None and (silence.beat is beat or silence.beat == beat):
            return
        if silence is not None and silence.beat is not None:
            section = self._sections[silence.beat.section]
            section.signs += 1
            section.longest = max(section.longest, self.now - silence.since)
        self._silences[rank] = _Silence(beat, self.now)

    def _silence(self, rank: int) -> float:
        return self.now - self._silences[rank].since

    def _limit(self, rank: int) -> tuple[float, bool, float]:
        """Return how long a rank may be silent where it is, whether that was learned, and what it was granted."""
        silence = self._silences[rank]
        if silence.beat is None or silence.beat.section == OUTSIDE:
            return FIRST_SECONDS, False, max(FIRST_SECONDS, silence.excused)
        given = silence.beat.limits[silence.beat.section]
        limit = self._sections[silence.beat.section].limit if given == LEARNED else given
        return limit, given == LEARNED, max(limit, silence.excused)


def _place(beat: Beat | None) -> tuple[int, int]:
    return (0, 0) if beat is None else beat.place


class Ranks(Protocol):
    """Whose heartbeats can be read, and who can be asked for stacks. Ranks are given by their pids."""

    def beats(self, pids: Mapping[int, int]) -> dict[int, Beat | None]: ...
    def stacks(self, pids: Mapping[int, int], beats: Mapping[int, Beat | None]) -> dict[int, Stacks]: ...
    def another_is_behind(self) -> bool: ...


class StartedRanks:
    """The ranks that a supervisor has started, which share its directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._readers: dict[int, BeatReader] = {}

    def beats(self, pids: Mapping[int, int]) -> dict[int, Beat | None]:
        """Return what each rank noted last; None of one that has not begun."""
        for rank in pids:
            if rank not in self._readers:
                self._readers[rank] = BeatReader(self._directory, rank)
        return {rank: self._readers[rank].read() for rank in pids}

    def stacks(self, pids: Mapping[int, int], beats: Mapping[int, Beat | None]) -> dict[int, Stacks]:
        """Return what each rank does, as far as it tells."""
        return read_stacks(pids, beats, {rank: reader.stacks for rank, reader in self._readers.items()})

    def another_is_behind(self) -> bool:
        """Return False: there are no ranks but these."""
        return False


@dataclass(frozen=True)
class Stall:
    """The ranks that have stalled, and what to tell of it."""

    ranks: tuple[int, ...]
    message: str


@dataclass
class _Doubt:
    """What the ranks that have come least far were found to do since their limit is nearly over."""

    beats: dict[int, Beat | None]
    since: float
    work: dict[int, float]
    busy: set[int] = field(default_factory=set)
    stacks: dict[int, Stacks] | None = None
    """Of those that are busy."""
    asked_at: float = 0.0
    moved: set[int] = field(default_factory=set)
    """Those of them that get on, by their stacks."""


class Stalls:
    """Finds a stall among ranks, and tells of it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._watch = StallWatch()
        self._doubt: _Doubt | None = None

    @property
    def now(self) -> float:
        """The seconds that have passed while there was somebody to look."""
        return self._watch.now

    def look(self, pids: Mapping[int, int]) -> Stall | None:
        """Return the stall among the ranks that still run, given by their pids, or None where there is none.

        Takes up to 0.6 seconds where there may be one.
        """
        beats = self._ranks.beats(pids)
        behind = self._watch.look(beats)
        doubtful = [silent for silent in behind.values() if silent.seconds > silent.granted - silent.doubt_seconds]
        if not doubtful:
            self._doubt = None
            return None
        doubt = self._doubt = self._doubt_of({rank: beats[rank] for rank in behind}, pids)
        looked = (self._watch.now - doubt.since) / min(silent.doubt_seconds for silent in doubtful)
        if doubt.stacks is None:
            doubt.busy |= {rank for rank in behind if self._is_busy(doubt, rank, pids[rank])}
            if looked > 0.5:
                # One that sleeps is not asked before it is sure that it stalls: a signal might wake it.
                self._ask(doubt, pids, beats)
        elif looked < 0.9 and self._watch.now - doubt.asked_at > _ASK_SECONDS:
            # Again and again: a short loop is often met at the same line twice.
            self._ask(doubt, pids, beats)
        if doubt.stacks is None or looked < 0.9 or not any(silent.is_late for silent in doubtful):
            return None
        self._doubt = None
        stacks = self._ranks.stacks(pids, beats)
        if doubt.stacks and self._ranks.beats(pids) != beats:
            return None
        doubt.moved |= {rank for rank in doubt.stacks if _works(doubt.stacks[rank], stacks[rank])}
        guilty = self._guilty(behind, doubt.moved, stacks)
        return Stall(tuple(guilty), describe(guilty, behind, pids, beats, stacks)) if guilty else None

    def _ask(self, doubt: _Doubt, pids: Mapping[int, int], beats: Mapping[int, Beat | None]) -> None:
        """Take note of what those do that are busy, and whether that is something else than before."""
        asked = self._ranks.stacks({rank: pids[rank] for rank in doubt.busy - doubt.moved}, beats)
        before = doubt.stacks or {}
        doubt.moved |= {rank for rank in asked if rank in before and _works(before[rank], asked[rank])}
        doubt.stacks, doubt.asked_at = {**before, **asked}, self._watch.now

    def _doubt_of(self, beats: dict[int, Beat | None], pids: Mapping[int, int]) -> _Doubt:
        if self._doubt is not None and self._doubt.beats == beats:
            return self._doubt
        return _Doubt(beats, self._watch.now, {rank: work_seconds(pids[rank]) for rank in beats})

    def _is_busy(self, doubt: _Doubt, rank: int, pid: int) -> bool:
        # What waits for a core or a disk may not have been given either in all the time since.
        return process_state(pid) in ("R", "D") or work_seconds(pid) - doubt.work[rank] > _ASLEEP * (
            self._watch.now - doubt.since
        )

    def _guilty(self, behind: Mapping[int, Silent], moved: set[int], stacks: Mapping[int, Stacks]) -> list[int]:
        """Return the ranks that have stalled; where there is none, those that were silent get more time."""
        late = [rank for rank, silent in behind.items() if silent.is_late]
        watched = [rank for rank in behind if stacks[rank].is_debugged]
        stopped = [rank for rank, each in stacks.items() if each.is_stopped]
        working = [rank for rank in moved if behind[rank].seconds < behind[rank].longest]
        stuck = [rank for rank in late if rank not in working and not stacks[rank].waits]
        spared = bool(watched) or self._ranks.another_is_behind()
        if not spared and (stopped or stuck):
            return stopped or stuck
        if not spared and not working and len(late) == len(behind):
            # Each of them waits for others.
            return late
        for rank in {*late, *working}:
            silent = behind[rank]
            # One that waits for a rank that is not late yet gets as long as that one.
            more = min(silent.seconds + silent.limit, silent.longest) if working else silent.seconds + _DOUBT_SECONDS
            self._watch.excuse(rank, math.inf if watched else more)
        return []


def _works(before: Stacks, after: Stacks) -> bool:
    """Whether a rank that is busy gets on, by its stacks."""
    # One that would run and does not answer has no core to do so.
    starved = after.state == "R" and not after.frames
    return before.frames != after.frames or after.collects or starved


def describe(
    guilty: list[int],
    behind: Mapping[int, Silent],
    pids: Mapping[int, int],
    beats: Mapping[int, Beat | None],
    stacks: Mapping[int, Stacks],
) -> str:
    """Return what to tell of a stall: the stacks of all ranks, those at fault last, and a sentence that names them."""
    groups: dict[str, list[int]] = {}
    for rank in pids:
        if rank not in guilty:
            groups.setdefault(str(stacks[rank]), []).append(rank)
    lines = ["the run has stalled. What each rank was doing, the innermost call first:"]
    for text, ranks in groups.items():
        waits = " (waiting for others)" if stacks[ranks[0]].waits else ""
        lines += [f"{_named(ranks, pids)}{waits}:", text]
    for rank in guilty:
        lines += [f"{_named([rank], pids)}:", str(stacks[rank])]
        if threads := stacks[rank].threads():
            lines.append(threads)
    silent = behind.get(guilty[0]) or max(behind.values(), key=lambda silent: silent.seconds)
    first = stacks[guilty[0]]
    state = " (stopped by a signal)" if first.is_stopped else " (waiting for another rank)" if first.waits else ""
    where = beats[guilty[0]] or "before fit"
    how = ", learned from this run" if silent.learned else ""
    lines.append(
        f"{_named(guilty, pids)} stalled{state}: no sign of life for {silent.seconds:.1f} s {where}; the limit is "
        f"{silent.limit:.4g} s{how}. If it only needs longer there, give Trainer(stall_timeout=...) more seconds."
    )
    return "\n".join(lines)


def _named(ranks: list[int], pids: Mapping[int, int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} (pid {pids[ranks[0]]})"
    return f"ranks {', '.join(map(str, ranks[:16]))}{' ...' if len(ranks) > 16 else ''}"
