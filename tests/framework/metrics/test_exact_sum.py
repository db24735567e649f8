"""Sums are exact: correctly rounded, and the same in any order and any grouping."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from phalanx.framework.metrics.metric_entry import partials_of, total_of


def numbers(count: int, spread: int) -> list[float]:
    generator = random.Random(count)
    return [generator.uniform(-1, 1) * 10.0 ** generator.randint(-spread, spread) for _ in range(count)]


@pytest.mark.parametrize(("count", "spread"), [(0, 0), (1, 8), (7, 150), (1024, 0), (1024, 150)])
def test_partials_hold_the_exact_sum(count: int, spread: int) -> None:
    values = numbers(count, spread)
    partials = partials_of(values)
    assert sum(map(Fraction, partials), Fraction()) == sum(map(Fraction, values), Fraction())
    assert total_of(partials) == total_of(values) == math.fsum(values)


def test_a_total_is_the_same_however_values_are_shared_out() -> None:
    values = numbers(1797, 20)
    shares = [partials_of(values[rank::7]) for rank in range(7)]
    assert total_of([partial for share in reversed(shares) for partial in share]) == total_of(values)


def test_partials_of_similar_values_are_few() -> None:
    assert len(partials_of([0.1] * 1000)) <= 2
    assert partials_of([]) == partials_of([0.0, -0.0]) == partials_of([1e300, -1e300]) == []


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, math.inf, 1.0], math.nan),
        ([1e308, 1e308], math.inf),
    ],
)
def test_what_is_not_finite_stays_so(values: list[float], total: float) -> None:
    for found in (total_of(values), total_of(partials_of(values)), total_of(partials_of(partials_of(values)))):
        assert found == total or (math.isnan(found) and math.isnan(total))


def test_tiny_and_huge_values_do_not_swallow_each_other() -> None:
    assert total_of(partials_of([1e100, 1.0, -1e100])) == 1.0
    assert total_of(partials_of([5e-324, 1e308, -1e308])) == 5e-324
