"""No rank waits for another forever, whatever its data and whenever ranks raise signals: see ``make deadlocks``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deadlock_run import Act, Case, drawn
from deadlock_trials import Trials

SETTINGS = {"max_epochs": 2, "num_sanity_val_steps": 0, "nonfinite": "skip"}
WITHOUT_DATA = Case(0, "ddp", 2, "stream", (6, 4), (1, 1), "plain", SETTINGS, (1,), (), None, ())
"""Rank 1 has no data in the fifth and sixth step."""


def check(folder: Path, case: Case) -> None:
    assert Trials(folder).problem_of(case) == ""


@pytest.mark.parametrize("strategy", ["fsdp", "zero3", "hsdp"])
@pytest.mark.parametrize("what", ["stop", "preempt", "trigger"])
def test_a_signal_in_a_step_in_which_a_rank_has_no_data(tmp_path: Path, strategy: str, what: str) -> None:
    check(tmp_path, replace(WITHOUT_DATA, strategy=strategy, acts=(Act(0, "on_train_batch_end", 3, what),)))


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_asynchronous_saves_that_end_in_a_step_in_which_a_rank_has_no_data(tmp_path: Path, strategy: str) -> None:
    saving: tuple[tuple[str, Any], ...] = (("every_n_train_steps", 1), ("asynchronous", True))
    check(tmp_path, replace(WITHOUT_DATA, strategy=strategy, saving=saving))


def test_buffers_that_ddp_broadcasts_from_a_rank_without_data(tmp_path: Path) -> None:
    acts = tuple(Act(1, "on_train_batch_end", at, "trigger") for at in range(3, 6))
    check(tmp_path, replace(WITHOUT_DATA, batches=(4, 6), layers="buffers", acts=acts))


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_batch_with_nan_on_one_rank(tmp_path: Path, strategy: str) -> None:
    settings = {**SETTINGS, "nonfinite": "raise"}
    check(
        tmp_path, replace(WITHOUT_DATA, strategy=strategy, settings=settings, acts=(Act(1, "fetch", 2, "bad batch"),))
    )


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_rank_whose_only_batch_a_hook_has_skipped(tmp_path: Path, strategy: str) -> None:
    acts = (Act(1, "on_train_batch_start", 0, "end epoch"),)
    check(tmp_path, replace(WITHOUT_DATA, strategy=strategy, batches=(2, 1), acts=acts))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3", "hsdp"])
def test_random_fits(tmp_path: Path, strategy: str) -> None:
    trials = Trials(tmp_path)
    assert [trials.problem_of(drawn(seed, strategy, 2)) for seed in (11, 20, 40)] == [""] * 3


def test_random_fits_on_three_ranks(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    assert [trials.problem_of(drawn(seed, "fsdp", 3)) for seed in (307, 308)] == [""] * 2
