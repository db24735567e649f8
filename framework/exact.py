"""Sums of floats that are exact, so that a mean is the same number on any count of ranks and in any order.

Each value is an IEEE double. A sum is kept as non-overlapping partials (Shewchuk 1997, "Adaptive Precision
Floating-Point Arithmetic"), whose exact total is rounded once, when it is read.
"""

from __future__ import annotations

import math

_COMPACT_AT = 1024


class ExactSum:
    """A growing sum that costs a list append for each value."""

    __slots__ = ("_values",)

    def __init__(self, partials: list[float] | None = None) -> None:
        self._values: list[float] = partials or []

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)
        if len(self._values) >= _COMPACT_AT:
            self._values = partials_of(self._values)

    def partials(self) -> list[float]:
        """Return few floats whose exact sum is that of all values added."""
        self._values = partials_of(self._values)
        return self._values


def partials_of(values: list[float]) -> list[float]:
    """Return non-overlapping floats with exactly the sum of ``values``; one non-finite float where it has none."""
    if not math.isfinite(total := sum(values)):
        return [total]
    partials: list[float] = []
    for value in values:
        kept = 0
        for partial in partials:
            if abs(value) < abs(partial):
                value, partial = partial, value
            high = value + partial
            low = partial - (high - value)
            if low:
                partials[kept] = low
                kept += 1
            value = high
        partials[kept:] = [value]
    return partials


def total_of(values: list[float]) -> float:
    """Return the exact sum of ``values``, rounded once."""
    return math.fsum(values) if math.isfinite(total := sum(values)) else total
