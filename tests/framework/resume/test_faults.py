"""Exceptions on one rank, at a few places of ``tests/fault_trials.py``: no path waits for ranks that never come."""

from __future__ import annotations

import pytest
from fault_trials import trial

# On a quiet machine it is 2 s; one that is busy with other things is given more.
SECONDS = 6.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("strategy", "site"), [("fsdp", "worker:1"), ("ddp", "callback:0")])
def test_an_exception_on_one_rank_ends_all_and_is_named(
    tmp_path_factory: pytest.TempPathFactory, strategy: str, site: str
) -> None:
    # A short name: workers of loaders have sockets in folders below it, and a socket's path has 107 bytes at most.
    assert trial(tmp_path_factory.mktemp("f") / "r", strategy, site, SECONDS).problems == ()
