"""SIGKILL at random instants, then the same command again: a few of the trials of ``tests/kill_trials.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_trials import run_trials


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("strategy", "trials"), [("ddp", 1)])
def test_a_killed_run_ends_bit_identical(tmp_path: Path, strategy: str, trials: int) -> None:
    tally = run_trials(tmp_path, [strategy], trials, seed=1)[strategy]
    assert tally.problems == []
    assert tally.identical == trials
