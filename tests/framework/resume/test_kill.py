"""SIGKILL at random instants, then the same command again: a few of the trials of ``tests/kill_trials.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_trials import run_trials


@pytest.mark.timeout(240)
def test_a_killed_run_ends_bit_identical(tmp_path: Path) -> None:
    tally = run_trials(tmp_path, ["single"], 1, seed=1)["single", 1]
    assert tally.problems == []
    assert tally.identical == 1


@pytest.mark.timeout(400)
def test_a_killed_pipeline_of_sharded_stages_ends_bit_identical(tmp_path: Path) -> None:
    strategy = "pipeline pp=2 dp_shard=2"
    tally = run_trials(tmp_path, [strategy], 1, seed=1)[strategy, 4]
    assert tally.problems == []
    assert tally.identical == 1
