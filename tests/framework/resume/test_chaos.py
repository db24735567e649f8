"""A run that is disturbed ends as one that is not: a few of the trials of ``tests/chaos.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import run_chaos


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strategy", "fault"), [("single", "kill-all"), ("ddp", "kill-rank"), ("pipeline pp=2 dp_shard=2", "kill-all")]
)
def test_a_disturbed_run_ends_bit_identical(strategy: str, fault: str, tmp_path: Path) -> None:
    tallies = run_chaos(tmp_path, [strategy], [fault], 1, in_a_row=1, seed=2, seconds=8.0)
    (tally,) = tallies.values()
    assert tally.problems == []
    assert (tally.trials, tally.identical, tally.orphans) == (1, 1, 0)
