"""Verdicts on two configurations by their seeds, against tests computed by hand."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
from scipy import stats  # type: ignore[import-untyped]

from phalanx.framework.report.noise import BETTER, WITHIN_NOISE, WORSE, judge


@pytest.mark.parametrize(("mode", "verdict"), [("min", BETTER), ("max", WORSE)])
def test_pairs_of_runs_with_the_same_seed_cancel_what_the_seed_does(mode: str, verdict: str) -> None:
    # The seeds differ by far more than the configurations do.
    old = {1: 1.00, 2: 5.00, 3: 9.00}
    new = {1: 0.90, 2: 4.89, 3: 8.91}
    found = judge(new, old, mode)
    differences = [new[seed] - old[seed] for seed in old]
    assert found.verdict == verdict
    assert found.difference == pytest.approx(fmean(differences))
    assert found.noise == pytest.approx(4.303 * stdev(differences) / math.sqrt(3))
    assert judge({seed + 10: value for seed, value in new.items()}, old, mode).verdict == WITHIN_NOISE


@pytest.mark.parametrize("freedom", [29, 30, 31, 32, 60, 500])
def test_the_limit_is_that_of_the_t_test_for_any_number_of_seeds(freedom: int) -> None:
    differences = [(-1.0) ** seed * (1 + seed / 7) for seed in range(freedom + 1)]
    found = judge(dict(enumerate(differences)), dict.fromkeys(range(freedom + 1), 0.0), "min")
    expected = stats.t.ppf(0.975, freedom) * stdev(differences) / math.sqrt(freedom + 1)
    assert found.noise == pytest.approx(expected, rel=3e-4)


def test_one_run_is_held_against_the_spread_of_the_others() -> None:
    old = {1: 1.0, 2: 1.1, 3: 0.9, 4: 1.0}
    inside, outside = judge({9: 1.1}, old, "min"), judge({9: 2.0}, old, "min")
    assert inside.noise == pytest.approx(3.182 * stdev(old.values()) * math.sqrt(1 + 1 / 4))
    assert (inside.verdict, outside.verdict) == (WITHIN_NOISE, WORSE)


@pytest.mark.parametrize(("new", "old"), [({1: 0.1}, {1: 9.0}), ({1: 0.1}, {2: 9.0})])
def test_one_run_each_says_nothing(new: dict[int, float], old: dict[int, float]) -> None:
    found = judge(new, old, "min")
    assert (found.verdict, found.noise) == (WITHIN_NOISE, None)
    assert found.difference == pytest.approx(-8.9)
    assert "--seeds" in found.sentence


def test_seeds_without_an_effect_say_nothing() -> None:
    found = judge({1: 1.0, 2: 1.0}, {1: 2.0, 2: 2.0}, "min")
    assert (found.verdict, found.noise) == (WITHIN_NOISE, None)
    assert "seed_everything" in found.sentence
