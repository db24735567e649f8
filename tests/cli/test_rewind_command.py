"""``phalanx rewind``: the next fit continues from the step, without the data of the steps that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from called_command import CalledCommand
from ranks import run_on_ranks
from recorded_samples import Recorder, recorded
from torch import nn

from phalanx.framework.system.run_directory import RunDirectory

SAMPLES, EVERY = 20, 4


def trained(root: str, ckpt_path: str | None, ranks: int = 1, **arguments: Any) -> Any:
    """Return the windows, the weights and the path of the run."""
    given = {"max_epochs": 2, "devices": ranks, **arguments}
    module, trainer = recorded(root, ckpt_path, SAMPLES, EVERY, given, shuffle=True)
    return module.windows, [float(each) for each in module.parameters()], str(trainer.run_dir)


def test_the_run_continues_without_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows, _, run = trained(str(tmp_path), None)
    done = json.loads(CalledCommand("rewind", capsys)(run, "--skip", "13:15", "--skip", 17, "--json").out)
    assert (done["step"], Path(done["checkpoint"]).name) == (12, "epoch=1-step=12.ckpt")
    assert [Path(each).name for each in done["moved"]] == ["epoch=1-step=16.ckpt", "epoch=1-step=20.ckpt"]
    assert all(Path(each).is_dir() for each in done["moved"])

    # In plain torch, from the state after 12 steps, with the other steps' samples in the order of the first run.
    again, weights, same = trained(str(tmp_path), "auto")
    assert same == run
    kept = [samples for _, _, step, samples in windows if step >= 12 and step not in (13, 14, 17)]
    assert [each.samples for each in again] == kept
    assert [each.step for each in again] == list(range(12, 12 + len(kept)))
    network = nn.Linear(1, 1)
    torch.manual_seed(3)
    network.load_state_dict(Recorder(SAMPLES).net.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for samples in [each.samples for each in windows if each.step < 12] + kept:
        optimizer.zero_grad()
        (network(torch.tensor(samples).float()[:, None] / SAMPLES) - 1).square().mean().backward()
        optimizer.step()
    assert weights == [float(each) for each in network.parameters()]

    # A run that is stopped and resumed afterwards leaves out the same, and shows it.
    shown = json.loads(CalledCommand("data", capsys)(run, "--step", 13, "--json").out)["windows"]
    assert [each["applied"] for each in shown] == [False, False, True]
    assert "went back to epoch=1-step=12.ckpt (step 12)" in " ".join(CalledCommand("why", capsys)(run).out.split())


def test_a_later_stop_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, runs = CalledCommand("rewind", capsys), []
    for stopped in (False, True):
        _, _, run = trained(str(tmp_path / str(stopped)), None)
        assert command(run, "--skip", "13:16").code == 0
        if stopped:
            trained(str(tmp_path / str(stopped)), "auto", max_steps=13)
        runs.append(trained(str(tmp_path / str(stopped)), "auto"))
    assert runs[0][1] == runs[1][1]
    # Also from the checkpoint alone, in another directory.
    checkpoint = next(Path(runs[0][2], "checkpoints").glob("*step=16.ckpt"))
    assert trained(str(tmp_path / "other"), str(checkpoint))[1] == runs[0][1]


@pytest.mark.parametrize(("ranks", "others"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_leaves_out_the_same_samples(
    ranks: int, others: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_on_ranks(ranks, trained, str(tmp_path), None, ranks)
    steps = range(13, 15) if ranks == 1 else range(6, 8)
    left_out = {each for windows, *_ in first for window in windows if window.step in steps for each in window.samples}
    assert CalledCommand("rewind", capsys)(first[0][2], "--skip", f"{steps.start}:{steps.stop}").code == 0

    second = run_on_ranks(others, trained, str(tmp_path), "auto", others)
    seen = [each for windows, *_ in second for window in windows if window.epoch == 1 for each in window.samples]
    assert len(seen) == len(set(seen))
    assert not left_out & set(seen)
    # Windows of two ranks are twice as long, so that one may hold other samples too.
    assert len(seen) >= SAMPLES - len(left_out) - (8 if ranks == 1 else 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--to N"),
        (["--skip", "9:7"], "--skip 9:7"),
        (["--skip", "x"], "--skip x"),
        (["--to", "99"], "20 steps"),
        (["--to", "2"], "no checkpoint at or before step 2"),
        (["--to", "16", "--skip", "13:17"], "begins before step 16"),
        (["--skip", "19:22"], "20 steps"),
    ],
)
def test_bad_requests(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, run = trained(str(tmp_path), None)
    before = sorted(Path(run).rglob("*"))
    done = CalledCommand("rewind", capsys)(run, *arguments)
    assert done.code != 0
    assert said in done.err
    assert sorted(Path(run).rglob("*")) == before


def test_a_run_that_trains_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, run = trained(str(tmp_path), None)

    directory = RunDirectory(tmp_path, "phalanx_logs", 0)
    directory.acquire(fresh=False)
    try:
        done = CalledCommand("rewind", capsys)(run, "--to", 12)
    finally:
        directory.release()
    assert done.code != 0
    assert "is being written by" in done.err
