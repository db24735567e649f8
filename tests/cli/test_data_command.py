"""``phalanx data``: the samples of each step are those that the training step was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from called_command import CalledCommand
from models import SILENT
from ranks import run_on_ranks
from recorded_samples import Recorder, Window, recorded
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from phalanx import AccumulationSchedule, Trainer

SAMPLES = 27


def trained(root: str, ckpt_path: str | None, arguments: dict[str, Any], **options: Any) -> Any:
    """Return the windows, the number of steps, and the path of the run."""
    module, trainer = recorded(root, ckpt_path, SAMPLES, 3, {"max_epochs": 3, **arguments}, **options)
    return module.windows, trainer.global_step, str(trainer.run_dir)


def checked(command: CalledCommand, run: str, ranks: list[list[Window]], steps: range) -> None:
    for step in steps:
        expected: dict[int, list[list[int]]] = {}
        for rank, windows in enumerate(ranks):
            for each in windows:
                if each.step == step:
                    expected.setdefault(each.attempt, [[] for _ in ranks])[rank] += each.samples
        found = json.loads(command(run, "--step", step, "--json").out)["windows"]
        assert [[each["indices"] for each in window["ranks"]] for window in found] == list(expected.values())
        assert [window["applied"] for window in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, {}),
        (2, {"accumulate_grad_batches": {0: 1, 1: 3}}),
        (1, {"nonfinite": "skip", "accumulate_grad_batches": 2}),
        (2, {"nonfinite": "skip", "accumulate_grad_batches": 2}),
        (2, {"limit_train_batches": 5}),
        (2, {"global_batch_size": 5}),
        (1, {"accumulate_grad_batches": AccumulationSchedule.cycle([1, 2])}),
    ],
)
def test_the_samples_of_each_step(
    ranks: int, arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_on_ranks(ranks, shuffled, str(tmp_path), ranks, arguments)
    _, steps, run = results[0]
    checked(CalledCommand("data", capsys), run, [windows for windows, *_ in results], range(steps))


def shuffled(root: str, ranks: int, arguments: dict[str, Any]) -> Any:
    return trained(root, None, {"devices": ranks, **arguments}, shuffle=True)


@pytest.mark.parametrize(("ranks", "others", "max_steps"), [(1, 2, 20), (2, 1, 11)])
def test_a_resumed_run_and_another_number_of_ranks(
    ranks: int, others: int, max_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_on_ranks(ranks, shuffled, str(tmp_path), ranks, {"max_steps": max_steps})
    # From the newest checkpoint, which is saved after each third step.
    second = run_on_ranks(others, resumed, str(tmp_path), others)
    _, steps, run = second[0]
    assert run == first[0][2]

    command, began = CalledCommand("data", capsys), max_steps // 3 * 3
    checked(command, run, [windows for windows, *_ in first], range(began))
    checked(command, run, [windows for windows, *_ in second], range(began, steps))


def resumed(root: str, ranks: int) -> Any:
    return trained(root, "auto", {"devices": ranks}, shuffle=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ((row,) for row in torch.arange(SAMPLES).float()[:, None])


def test_what_only_the_program_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, drawn = trained(str(tmp_path / "drawn"), None, {}, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    trainer = Trainer(**{**SILENT, "logger": "csv", "max_epochs": 1}, default_root_dir=tmp_path / "stream")
    trainer.fit(Recorder(SAMPLES), DataLoader(Stream(), 2))
    command = CalledCommand("data", capsys)

    (window,) = json.loads(command(drawn, "--step", 16, "--json").out)["windows"]
    assert (window["epoch"], window["batches"], window["positions"]) == (1, [2], [4, 6])
    assert (window["ranks"], window["order"]) == (None, "WeightedRandomSampler")
    assert "step 16: epoch 1, batch 2" in (shown := command(drawn, "--epoch", 1, "--batch", 2).out)
    assert "WeightedRandomSampler" in shown
    (window,) = json.loads(command(trainer.run_dir, "--step", 5, "--json").out)["windows"]
    assert (window["batches"], window["ranks"]) == ([5], None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "99"], "3 steps"),
        (["--epoch", "7", "--batch", "0"], "epoch 7"),
        (["--epoch", "0", "--batch", "40"], "batch 40"),
        ([], "--step N"),
        (["--step", "1", "--epoch", "0"], "--step N"),
        (["--step", "1", "--rank", "1"], "1 rank"),
    ],
)
def test_bad_requests(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, run = trained(str(tmp_path), None, {"max_steps": 3})
    done = CalledCommand("data", capsys)(run, *arguments)
    assert done.code != 0
    assert said in done.err
