"""``judge``: whether the values of one configuration are better than those of another, or within the noise of seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

BETTER, WORSE, WITHIN_NOISE = "better", "worse", "within noise"
# Two-sided quantiles of Student's t distribution at 95 percent, by degrees of freedom from 1 on.
_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# The same quantile of the normal distribution.
_NORMAL = 1.959964


@dataclass(frozen=True)
class Judgement:
    """The comparison of two configurations."""

    verdict: str
    """``"better"``, ``"worse"`` or ``"within noise"``."""
    difference: float
    """The mean of the new values less that of the old ones; over the seeds that both have, if these are two or more."""
    noise: float | None
    """The largest difference that the noise of seeds explains, at 95 percent; None if it is not known."""
    sentence: str
    """The reason for the verdict."""


def judge(new: Mapping[int, float], old: Mapping[int, float], mode: str) -> Judgement:
    """Compare the values of two configurations, each by its seed.

    Two or more common seeds are compared in pairs, by a paired t test at 95 percent. Else the noise comes from the
    spread of each configuration over its own seeds, if one of them has two or more. Without either the noise is not
    known, and no difference counts.

    Args:
        new: the values of the new configuration, at least one.
        old: those of the earlier one, at least one.
        mode: ``"min"`` if lower values are better, or ``"max"``.
    """
    common = sorted(set(new) & set(old))
    if len(common) < 2:
        return _judge_apart([*new.values()], [*old.values()], mode)
    pairs = [(new[seed], old[seed]) for seed in common]
    if all(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return _unknown(
            pairs[0][0] - pairs[0][1], "all seeds give the same values: call seed_everything in the program"
        )
    differences = [one - other for one, other in pairs]
    noise = _quantile(len(common) - 1) * stdev(differences) / math.sqrt(len(common))
    return _judged(fmean(differences), noise, mode, f"{len(common)} pairs of runs with the same seed")


def _judge_apart(new: Sequence[float], old: Sequence[float], mode: str) -> Judgement:
    difference, freedom = fmean(new) - fmean(old), len(new) + len(old) - 2
    if freedom == 0:
        return _unknown(difference, "one run each, so the noise is not known: give --seeds 3 or more")
    squares = sum((value - fmean(side)) ** 2 for side in (new, old) for value in side)
    if squares == 0:
        return _unknown(difference, "all seeds give the same values: call seed_everything in the program")
    noise = _quantile(freedom) * math.sqrt(squares / freedom * (1 / len(new) + 1 / len(old)))
    return _judged(difference, noise, mode, f"{len(new)} new and {len(old)} earlier runs, unpaired")


def _judged(difference: float, noise: float, mode: str, basis: str) -> Judgement:
    if abs(difference) <= noise:
        return Judgement(WITHIN_NOISE, difference, noise, basis)
    return Judgement(BETTER if (difference < 0) == (mode == "min") else WORSE, difference, noise, basis)


def _unknown(difference: float, reason: str) -> Judgement:
    return Judgement(WITHIN_NOISE, difference, None, reason)


def _quantile(freedom: int) -> float:
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    # The first terms of the expansion around the normal distribution (Abramowitz and Stegun 1964, 26.7.5).
    first = (_NORMAL**3 + _NORMAL) / 4
    second = (5 * _NORMAL**5 + 16 * _NORMAL**3 + 3 * _NORMAL) / 96
    return _NORMAL + first / freedom + second / freedom**2
