"""Ranks that a watchdog looks at, of which a test says where they are and what they do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from phalanx.framework.watchdog.heartbeat import SECTIONS, HeartbeatRecord, resolve_stall_timeout
from phalanx.framework.watchdog.stack_dump import Stacks

AT_WORK = Stacks(('  File "train.py", line 3 in training_step',))
WAITING = Stacks(('  File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce',))


def record(number: int, section: str = "step", phase: int = 0, limit: Any = None) -> HeartbeatRecord:
    """Return the record of a rank in its optimizer step ``number``."""
    return HeartbeatRecord(
        1, 1, 0, resolve_stall_timeout(limit), number, SECTIONS.index(section), phase, number, 0, number
    )


class SimulatedRanks:
    """Ranks whose records are given, and the stacks that they have in turn."""

    def __init__(self, records: Mapping[int, HeartbeatRecord | None], stacks: Mapping[int, list[Stacks]]) -> None:
        self._records = dict(records)
        self._stacks = {rank: itertools.cycle(each) for rank, each in stacks.items()}
        self.asked: list[set[int]] = []
        self.peer_is_behind = False

    def records(self, pids: Mapping[int, int]) -> dict[int, HeartbeatRecord | None]:
        """Return the records of some ranks."""
        return {rank: self._records[rank] for rank in pids}

    def stacks(self, pids: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None]) -> dict[int, Stacks]:
        """Return the next stacks of some ranks."""
        if pids:
            self.asked.append(set(pids))
        return {rank: next(self._stacks[rank]) for rank in pids}

    def another_is_behind(self) -> bool:
        """Whether a rank that is not here has less progress."""
        return self.peer_is_behind
