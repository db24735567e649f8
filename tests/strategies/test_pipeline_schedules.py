"""Pipelines run torch's schedules as torch's own examples do: the same actions and messages, and the bubble of the
papers."""

from __future__ import annotations

import pytest
from pipeline_table import SCHEDULES, bubble, formula, measured


@pytest.mark.parametrize(("schedule", "ranks"), [(name, 4 if name == "1f1b" else 2) for name in SCHEDULES])
def test_a_schedule_does_what_torchs_own_example_does(schedule: str, ranks: int) -> None:
    row = measured(schedule, ranks, window=8)

    for ours, torchs in zip(row.ours, row.torchs, strict=True):
        assert ours.actions == torchs.actions
        assert (ours.messages, ours.sent_bytes) == (torchs.messages, torchs.sent_bytes)
    assert bubble(row.ours) == pytest.approx(formula(schedule, ranks, window=8))
