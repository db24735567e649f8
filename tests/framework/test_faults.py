"""Exceptions on one rank, at a few places of ``tests/fault_trials.py``: no path waits for ranks that never come."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_trials import trial

# On a quiet machine it is 2 s; one that is busy with other things is given more.
SECONDS = 6.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("strategy", "site"), [("fsdp", "worker:1"), ("ddp", "callback:0")])
def test_an_exception_on_one_rank_ends_all_and_is_named(tmp_path: Path, strategy: str, site: str) -> None:
    assert trial(tmp_path / "run", strategy, site, SECONDS).problems == ()
