"""Pipelines run torch's schedules as torch's own examples do: the same actions and messages, and the bubble of the
papers."""

from __future__ import annotations

import pytest
from pipeline_table import SCHEDULES, bubble, formula, measured


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_does_what_torchs_own_example_does(schedule: str) -> None:
    row = measured(schedule, ranks=2, window=8)

    for ours, torchs in zip(row.ours, row.torchs, strict=True):
        assert ours.actions == torchs.actions
        assert (ours.messages, ours.sent_bytes) == (torchs.messages, torchs.sent_bytes)
    assert bubble(row.ours) == pytest.approx(formula(schedule, ranks=2, window=8))


def test_more_ranks_wait_longer() -> None:
    row = measured("1f1b", ranks=4, window=8)

    assert bubble(row.ours) == pytest.approx(formula("1f1b", ranks=4, window=8)) == pytest.approx(3 / 11)
