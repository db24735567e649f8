"""Snapshots in memory: the two directories that take turns, and the steps between two of them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.intervals import Interval

if TYPE_CHECKING:
    from ..distributed.world import World

AUTO = "auto"
COPIES = 3
"""Two snapshots, and the copy from which one of them is written."""
_NAMES = "memory-0.ckpt", "memory-1.ckpt"
_SHARE = 0.02
# The first costs are not typical: memory is allocated, and code compiled. So intervals grow at most by this factor.
_GROWTH = 4


class Slots:
    """Two directories that take turns, so that one holds a complete snapshot at any time.

    Args:
        folder: their directory, the same for all ranks.
        kept: the snapshot that is replaced last; None if there is none.
    """

    def __init__(self, folder: Path, kept: Path | None) -> None:
        self._folder = folder
        self._turn = 1 if kept is not None and kept.name == _NAMES[0] else 0

    def next(self) -> Path:
        """Return the directory of the next snapshot."""
        path = self._folder / _NAMES[self._turn]
        self._turn = 1 - self._turn
        return path


class SnapshotInterval:
    """The steps between two snapshots, given or found from their cost.

    Args:
        every: the number of steps; ``"auto"`` for at most 2 % of the time; or a time such as ``"5 min"``, from which
            the steps follow that take it.
        step: the present step. The first snapshot is due one interval after it.
    """

    def __init__(self, every: int | str, step: int) -> None:
        self.is_auto = isinstance(every, str)
        """Whether the number of steps is found from what the last ones took."""
        self._wanted_seconds = (
            Interval.parse(every, units=("seconds",)).number if self.is_auto and every != AUTO else None
        )
        self._steps = 1 if isinstance(every, str) else every
        self._last = step, time.perf_counter()
        self.due: float = step + self._steps
        """The step after which the next snapshot is due."""

    def begin(self, step: int, began: float, cost: float, world: World) -> None:
        """Note the start of a snapshot, and agree on the interval from now on. Collective.

        Args:
            step: the present step.
            began: the time at which it ended, by ``time.perf_counter``.
            cost: the seconds that the last snapshot took.
            world: the ranks, of which rank 0 finds the interval.
        """
        if self.is_auto:
            self._steps = world.broadcast_object(self._found(step, began, cost))
        self.due = step + self._steps

    def _found(self, step: int, began: float, cost: float) -> int:
        """Return the steps that take the given time, or in which the cost of a snapshot is at most its share of it."""
        before, then = self._last
        seconds = (began - then) / max(1, step - before)
        wanted = cost / _SHARE if self._wanted_seconds is None else self._wanted_seconds
        return min(max(1, math.ceil(wanted / seconds)), _GROWTH * self._steps)

    def end(self, step: int) -> None:
        """Note the end of a snapshot."""
        self._last = step, time.perf_counter()

    def stop(self) -> None:
        """Let no further snapshot be due."""
        self.due = math.inf
