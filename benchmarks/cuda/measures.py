"""The arithmetic of the results: utilization of the device, paired ratios and differences, spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NOMINAL_FLOPS = 989e12
"""Dense bf16 operations of an H100 or H200 (SXM) in a second, by its data sheet."""


def model_flops_utilization(elements: int, tokens_per_second: float, peak_flops: float) -> float:
    """Return the share of a peak that training uses.

    Forward and backward pass take six operations for each parameter and token. Those of attention, which depend on the
    length, are not counted.
    """
    return 6 * elements * tokens_per_second / peak_flops


def tokens_per_second(tokens: int, seconds: Sequence[float]) -> float:
    """Return the median over the rounds of the tokens of a step per second."""
    return tokens / statistics.median(seconds)


def speed_ratio(reference: Sequence[float], own: Sequence[float]) -> float:
    """Return the speed relative to a reference: the median of the rounds' ratios of seconds.

    Rounds of both were measured moments apart, so their ratio is steadier than the ratio of the medians.
    """
    return statistics.median(theirs / ours for theirs, ours in zip(reference, own, strict=True))


def added_microseconds(reference: Sequence[float], own: Sequence[float]) -> float:
    """Return the median over the rounds of the microseconds that a step takes longer than that of a reference."""
    return statistics.median((ours - theirs) * 1e6 for theirs, ours in zip(reference, own, strict=True))


def spread(values: Sequence[float]) -> float:
    """Return the largest value less the smallest one, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)
