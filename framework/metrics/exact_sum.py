"""Sums of floats that are exact, so that a mean is the same number on any count of ranks and in any order.

A sum is kept as a few floats whose exact total is that of all values added; the total is rounded once, when it is read.
``math.fsum`` gives the correctly rounded sum; what it rounded off is the correctly rounded sum of the rest, and so on.
"""

from __future__ import annotations

import math


def partials_of(values: list[float]) -> list[float]:
    """Return few floats with exactly the sum of ``values``, the largest first; the one float that it is if not finite.

    Sums beyond the largest double are infinite.
    """
    if (rounded := sum(values)) - rounded != 0.0:
        return [rounded]
    partials: list[float] = []
    rest = [*values]
    try:
        # Each is at most half a unit in the last place of the one before, so there are seldom more than two.
        while part := math.fsum(rest):
            partials.append(part)
            rest.append(-part)
    except OverflowError:
        return [rounded]
    return partials


def total_of(values: list[float]) -> float:
    """Return the exact sum of ``values``, rounded once."""
    if (rounded := sum(values)) - rounded != 0.0:
        return rounded
    try:
        return math.fsum(values)
    except OverflowError:
        return rounded
