"""Detection of stragglers: the time that each rank computes in a step without waiting for other ranks.

Ranks that wait for one another in every step all have the same step time. They differ in the time between an update and
the next collective: data, hooks, and the forward pass unless it contains collectives. The control reduction sums the
running mean of that time and its square, so all ranks come to the same conclusion about whether they differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

LASTING = 20
"""Consecutive steps in which ranks must differ before they exchange their times."""
FIRST_PAUSE = 200
"""Steps between two exchanges of times; each exchange doubles it."""
RATIO = 1.5
_RATE = 0.1
_LEAST_SECONDS = 0.001
_LEAST_SHARE = 0.1


class Pace:
    """The time that this rank computes in a step without waiting for other ranks, in seconds."""

    def __init__(self) -> None:
        self.own = 0.0
        self.forward_counts = True
        """Whether the forward pass, between launch and read, contains no collective."""
        self._step = 0.0
        self._updated = self._launched = 0.0
        self._part = self._fetched = 0.0
        self._lasting = 0
        self._pause = FIRST_PAUSE
        self._next = 0

    def updated(self) -> None:
        """Record the end of an update."""
        now = time.perf_counter()
        if self._updated:
            self._step += _RATE * (now - self._updated - self._step)
        self._updated = now

    def fetched(self, seconds: float) -> None:
        """Count the time in which a batch was fetched within a window as computation."""
        self._fetched += seconds

    def launched(self) -> None:
        """Record the launch of the next control reduction."""
        self._launched = now = time.perf_counter()
        # Fetches of the previous window's later batches ended before its update.
        self._part = now - self._updated + self._fetched if self._updated else 0.0
        self._fetched = 0.0

    def arrived(self) -> None:
        """Record that this rank begins to wait for the others."""
        if self._part:
            taken = self._part + (time.perf_counter() - self._launched if self.forward_counts else 0.0)
            # An outlier, such as a validation between two steps, has a small weight.
            self.own = min(taken, 4 * self.own) * _RATE + (1 - _RATE) * self.own if self.own else taken

    def differs(self, step: int, size: int, total: float, squares: float) -> bool:
        """Whether ranks should exchange their times now; the same on all ranks."""
        # The spread if one rank takes 1.5 times as long as all others.
        least = (RATIO - 1) ** 2 * (size - 1) / (size - 1 + RATIO) ** 2
        apart = total > size * _LEAST_SECONDS and size * squares > total * total * (1 + least)
        self._lasting = self._lasting + 1 if apart else 0
        if self._lasting < LASTING or step < self._next:
            return False
        self._next, self._pause = step + self._pause, 2 * self._pause
        return True

    def straggler(self, seconds: Sequence[float]) -> str | None:
        """Return a message about the slowest rank, given the times of all ranks; None if it is not slow."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        more = seconds[slowest] - median
        if more < _LEAST_SHARE * self._step or seconds[slowest] < RATIO * median:
            return None
        return (
            f"Rank {slowest} holds up the others: without waiting for them it takes "
            f"{seconds[slowest] * 1e3:.3g} ms per step, "
            f"{seconds[slowest] / max(median, 1e-9):.1f} times as long as the median rank ({median * 1e3:.3g} ms). "
            "Look at its data, its hooks, and what else runs on its cores."
        )
