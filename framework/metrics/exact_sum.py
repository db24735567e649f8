"""Exact sums of floats, so that a mean is the same for any number of ranks and any order of addition.

A sum is stored as a few floats (partials) whose exact total equals that of all values; it is rounded once, when read.
``math.fsum`` gives the correctly rounded sum; the rounding error is again the correctly rounded sum of the rest, and so
on.
"""

from __future__ import annotations

import math


def partials_of(values: list[float]) -> list[float]:
    """Return a few floats with exactly the sum of ``values``, largest first; a single float if the sum is not finite.

    Sums that exceed the largest double are infinite.
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
