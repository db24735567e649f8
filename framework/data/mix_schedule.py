"""The order in which a mix draws from its sources: a fixed pattern in which every prefix has the right proportions."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from fractions import Fraction

LONGEST_PERIOD = 1 << 16
"""Weights that are not multiples of one fraction this small are rounded to multiples of ``1 / LONGEST_PERIOD``."""


class MixSchedule:
    """A periodic sequence of sources. In its first n draws, a source of share w is drawn between w n - 1 and w n + 1
    times, for each n.

    Args:
        weights: one weight for each source, not negative and not all 0. Only their ratios count.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = whole_weights(weights)
        """The number of draws from each source in a period."""
        self.period = sum(self.counts)
        self._sources = array("l", _pattern(self.counts))
        self._slots: list[array[int]] = [array("l") for _ in self.counts]
        self._ranks = array("l")
        for slot, source in enumerate(self._sources):
            self._ranks.append(len(self._slots[source]))
            self._slots[source].append(slot)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of draw ``index``, and how many draws from that source precede it."""
        periods, slot = divmod(index, self.period)
        source = self._sources[slot]
        return source, periods * self.counts[source] + self._ranks[slot]

    def position(self, source: int, count: int) -> int:
        """Return the index of the draw from ``source`` that ``count`` draws from that source precede."""
        periods, rank = divmod(count, self.counts[source])
        return periods * self.period + self._slots[source][rank]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same ratios, rounded if their sum would exceed ``LONGEST_PERIOD``."""
    # The text of a float is the number that was meant: 0.7 is 7/10, not the nearest binary fraction.
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    counts = [max(int(share * LONGEST_PERIOD), 1) if share else 0 for share in shares]
    counts[counts.index(max(counts))] -= max(sum(counts) - LONGEST_PERIOD, 0)
    by_remainder = sorted(range(len(shares)), key=lambda each: counts[each] - shares[each] * LONGEST_PERIOD)
    for each in by_remainder[: max(LONGEST_PERIOD - sum(counts), 0)]:
        counts[each] += 1
    return counts


def _pattern(counts: Sequence[int]) -> list[int]:
    """Return one period: earliest deadline first among the draws that are due (R. Tijdeman's chairman assignment)."""
    used = [source for source, count in enumerate(counts) if count]
    if len(used) == 1:
        return [used[0]] * counts[used[0]]
    period, slack = sum(counts), 2 * len(used) - 2

    def release(source: int, drawn: int) -> tuple[int, int]:
        return -(-period * (1 + slack * drawn) // (slack * counts[source])), source

    waiting = [release(source, 0) for source in used]
    heapq.heapify(waiting)
    due: list[tuple[int, int]] = []
    drawn = [0] * len(counts)
    pattern = []
    for slot in range(1, period + 1):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            deadline = period * (slack - 1 + slack * drawn[source]) // (slack * counts[source])
            heapq.heappush(due, (deadline, source))
        source = heapq.heappop(due)[1]
        pattern.append(source)
        drawn[source] += 1
        heapq.heappush(waiting, release(source, drawn[source]))
    return pattern
