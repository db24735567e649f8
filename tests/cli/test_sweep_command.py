"""``phalanx sweep``: real sweeps, pruned, failing and killed ones, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from called_command import CalledCommand
from messages import says
from ranks import run_command
from sweep_trials import PROGRAM, command, compared, sweep

from phalanx.cli.search_space import grid, parse_search

SEARCH = ["--search", "lr=0.1,0.09", "--metric", "val_loss"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalledCommand:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return CalledCommand("sweep", capsys)


def swept(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = run_command([sys.executable, "-m", "phalanx", "sweep", "train.py", *arguments], folder, timeout=200.0)
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else {"printed": done.stdout}


def test_trials_on_two_ranks_are_pruned_or_fail_and_the_best_one_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    search = ["--search", "lr=0.1,0.0 width=8,13", "--metric", "val_loss", "--sampler", "grid"]
    given = [*search, "--prune", "halving", "--ranks", "2", "--out", "out", "--json", "--", "--epochs", "3"]
    code, found = swept(tmp_path, *given)
    assert code == 0, found
    states = [(each["parameters"], each["state"]) for each in found["trials"]]
    assert states[1] == ({"lr": 0.1, "width": 13}, "failed")
    assert "an unlucky width" in found["trials"][1]["reason"]
    assert states[0] == ({"lr": 0.1, "width": 8}, "finished")
    assert found["best"] == found["trials"][0]
    assert found["best"]["command"] == "phalanx fit train.py --trainer.devices=2 -- --epochs 3 --lr=0.1 --width=8"
    report = json.loads(Path(tmp_path, found["best"]["run"], "report.json").read_text())
    assert report["settings"]["resolved"]["world_size"] == 2
    assert found["best"]["value"] == min(report["curves"]["val_loss"]["value"])
    assert found["best"]["command"] in (tmp_path / "out" / "sweep.html").read_text()

    # The second time nothing is left to do.
    assert swept(tmp_path, *given) == (code, found)


def test_a_pruned_trial_is_a_pruned_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    # Successive halving keeps the better one of two trials at its first rung, epoch 1.
    search = ["--search", "lr=0.1,0.1001,0.0", "--metric", "val_loss", "--sampler", "grid", "--prune", "halving"]
    code, found = swept(tmp_path, *search, "--json", "--", "--epochs", "4")
    assert code == 0, found
    assert [each["state"] for each in found["trials"]] == ["finished", "finished", "pruned"]
    pruned = found["trials"][2]
    assert pruned["reason"].startswith("pruned: val_loss = ")
    listed = run_command([sys.executable, "-m", "phalanx", "runs", "--json"], tmp_path)
    runs = {each["path"]: each for each in json.loads(listed.stdout)["runs"]}
    assert {path: each["state"] for path, each in runs.items()} == {
        each["run"]: each["state"] for each in found["trials"]
    }
    assert runs[pruned["run"]]["epochs"] < 4


def test_a_killed_sweep_continues_and_finds_what_an_undisturbed_one_finds(tmp_path: Path) -> None:
    given = command(3, 1, "--", "--pause", "0.05")
    whole = sweep(tmp_path / "whole", given, [], 200.0)
    killed = sweep(tmp_path / "killed", given, [7.0, 9.0], 200.0)
    assert compared(killed) == compared(whole)
    assert killed["best"]["parameters"] == whole["best"]["parameters"]
    assert [len([*(tmp_path / "killed" / "sweep").glob(f"trial-{number}/version_*")]) for number in range(3)] == [
        int(each["state"] != "failed") for each in whole["trials"]
    ]


def test_three_failures_from_the_start_end_the_sweep(call: CalledCommand) -> None:
    done = call("train.py", *SEARCH, "--sampler", "random", "--trials", "9", "--out", "out", "--", "--nothing")
    assert done.code == 1
    says(done.err, "first 3 trials", "--nothing")


def test_the_forms_of_a_search() -> None:
    space = parse_search(["lr=log:1e-5:1e-2 width=64,128", "layers=int:2:8:3 drop=0.0:0.5:0.25 on=true,false kind=a,b"])
    assert list(space) == ["lr", "width", "layers", "drop", "on", "kind"]
    del space["lr"]
    combinations = grid(space)
    assert len(combinations) == 2 * 3 * 3 * 2 * 2
    assert combinations[0] == {"width": 64, "layers": 2, "drop": 0.0, "on": True, "kind": "a"}
    assert combinations[-1] == {"width": 128, "layers": 8, "drop": 0.5, "on": False, "kind": "b"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["train.py", "--search", "lr", "--metric", "loss"], "'lr'"),
        (["train.py", "--search", "lr=1:2:x", "--metric", "loss"], "'lr=1:2:x'"),
        (["train.py", "--search", "lr=log:0:1", "--metric", "loss"], "'lr=log:0:1'"),
        (["train.py", "--search", "lr=2,2", "--metric", "loss"], "twice"),
        (["train.py", "--search", "lr=1,2 lr=3,4", "--metric", "loss"], "'lr'"),
        (["train.py", "--search", "", "--metric", "loss"], "empty"),
        (["train.py", "--search", "lr=0.0:1.0", "--metric", "loss", "--sampler", "grid"], "grid"),
        (["train.py", *SEARCH, "--trials", "0"], "--trials 0"),
        (["train.py", *SEARCH, "--ranks", "0"], "--ranks 0"),
        (["train.py", *SEARCH, "--", "--lr", "3"], "--lr"),
        (["train.py", "--search", "trainer.max_epoch=1,2", "--metric", "loss"], "max_epochs"),
        (["trian.py", *SEARCH], "train.py"),
        (["train.py", "--search", "lr=1,2", "--metric", "val_acc"], "--mode max"),
        (["train.py", "--search", "lr=1,2"], "--metric"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    call: CalledCommand, tmp_path: Path, arguments: list[str], name: str
) -> None:
    done = call(*arguments)
    assert done.code == 78
    says(done.err, name)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_directory_of_another_sweep_is_refused(call: CalledCommand, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.json").write_text('{"target": "/other.py"}')
    done = call("train.py", *SEARCH, "--out", "out")
    assert done.code == 78
    assert "holds a sweep with another target: /other.py there" in done.err
