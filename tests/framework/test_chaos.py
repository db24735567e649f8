"""A run that is disturbed ends as one that is not: a few of the trials of ``tests/chaos.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import run_chaos


@pytest.mark.timeout(300)
def test_a_disturbed_run_ends_bit_identical(tmp_path: Path) -> None:
    tallies = run_chaos(tmp_path, ["single"], ["stop", "damage"], 1, in_a_row=1, seed=2, seconds=8.0)
    assert [tally.problems for tally in tallies.values()] == [[], []]
    assert all(tally.identical == tally.trials == 1 for tally in tallies.values())
    assert all(tally.orphans == 0 for tally in tallies.values())
