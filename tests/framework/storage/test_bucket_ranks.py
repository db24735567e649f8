"""Runs of several ranks in a bucket: killed in the middle of uploads, and on nodes without a common disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import host_run
import pytest
import torch
from bucket_trials import run_trials
from buckets import Faults
from launched_nodes import outcome, several_nodes
from ranks import run_on_ranks

from phalanx import checkpoint as library


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_a_killed_run_goes_on_on_an_empty_machine_bit_by_bit(tmp_path: Path, strategy: str) -> None:
    tally = run_trials(tmp_path, strategy, 1, Faults(), seed=len(strategy))
    assert not tally.problems, tally.problems[0]
    assert tally.identical == tally.trials == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nodes_have_no_disk_in_common(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_run.URL, f"file://{tmp_path}/bucket")
    caches, folder = tmp_path / "caches", tmp_path / "run"
    folder.mkdir()
    for steps in (12, 20):
        arguments = [str(Path(host_run.__file__)), str(folder), strategy, "0", "1", str(steps)]
        with several_nodes(2, *arguments, caches=caches) as nodes:
            codes, printed = outcome(nodes)
        assert codes == [0, 0], printed
        assert f"ENDED {steps}" in printed[0]
        # Every time on new machines.
        shutil.rmtree(caches)
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "reader"))
    found = library.checkpoints(f"file://{tmp_path}/bucket/phalanx_logs/version_0/checkpoints", verify=True)
    assert [(one.step, one.status) for one in found] == [(step, "good") for step in range(4, 24, 4)]
    monkeypatch.delenv(host_run.URL)
    whole = tmp_path / "whole"
    whole.mkdir()
    run_on_ranks(2, host_run.main, whole, strategy, 2, 1, 20, timeout=60.0)
    weights = [torch.load(each / "weights.pt") for each in (folder, whole)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
