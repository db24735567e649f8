"""A few trials of ``chaos.py``, ``fault_trials.py`` and ``killed_streams.py``: runs that are killed, and that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import run_chaos
from fault_trials import trial
from killed_streams import killed_and_resumed
from library_streams import COUNT

# On a quiet machine a run ends 2 s after an exception; one that is busy with other things is given more.
SECONDS = 6.0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("strategy", "fault"), [("ddp", "kill-rank"), ("pipeline", "kill-all")])
def test_a_disturbed_run_ends_bit_identical(strategy: str, fault: str, tmp_path: Path) -> None:
    tallies = run_chaos(tmp_path, [strategy], [fault], 1, in_a_row=1, seed=2, seconds=8.0)
    (tally,) = tallies.values()
    assert tally.problems == []
    assert (tally.trials, tally.identical, tally.orphans) == (1, 1, 0)


@pytest.mark.timeout(240)
def test_an_exception_on_one_rank_ends_all_and_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    # A short name: workers of loaders have sockets in folders below it, and a socket's path has 107 bytes at most.
    assert trial(tmp_path_factory.mktemp("f") / "r", "fsdp", "worker:1", SECONDS).problems == ()


@pytest.mark.parametrize(("kind", "workers", "kill"), [("parquet", 2, 4), ("tar+shuffled", 0, 3)])
def test_after_a_kill_each_sample_of_a_stream_is_seen_once(tmp_path: Path, kind: str, workers: int, kill: int) -> None:
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    alike = (2, workers)
    before, after, output = killed_and_resumed(
        tmp_path, kind, kill, alike, alike, env=variables, libraries=("datasets", "webdataset")
    )
    assert "differs" not in output
    assert sorted(before + after) == list(range(COUNT))
