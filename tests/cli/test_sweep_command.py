"""``phalanx sweep``: real sweeps, pruned, failing and killed ones, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from called_command import CalledCommand, start_programs_warm
from command_terminal import PHALANX
from messages import says
from ranks import run_script, started_script, wait_until
from sweep_trials import PROGRAM, compared, sweep_arguments

from phalanx.cli.search_space import grid, parse_search

SEARCH = ["--search", "lr=0.1,0.09", "--metric", "val_loss"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalledCommand:
    monkeypatch.chdir(tmp_path)
    start_programs_warm(monkeypatch)
    (tmp_path / "train.py").write_text(PROGRAM)
    return CalledCommand("sweep", capsys)


def test_trials_on_two_ranks_are_pruned_or_fail_and_the_best_one_is_found(
    call: CalledCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Successive halving keeps the better one of two trials at its first rung, epoch 1.
    search = ["--search", "lr=0.1,0.1001,0.0 width=8,13", "--metric", "val_loss", "--sampler", "grid", "--trials", 5]
    given = ["train.py", *search, "--prune", "halving", "--ranks", 2, "--out", "out", "--json", "--", "--epochs", 4]
    done = call(*given)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    trials = found["trials"]
    assert [each["state"] for each in trials] == ["finished", "failed", "finished", "failed", "pruned"]
    assert trials[1]["parameters"] == {"lr": 0.1, "width": 13}
    assert "an unlucky width" in trials[1]["reason"]
    assert found["best"] == min(trials[0], trials[2], key=lambda each: each["value"])
    values = " ".join(f"--{name}={value}" for name, value in found["best"]["parameters"].items())
    assert found["best"]["command"] == f"phalanx fit train.py --trainer.devices=2 -- --epochs 4 {values}"
    report = json.loads(Path(found["best"]["run"], "report.json").read_text())
    assert report["settings"]["resolved"]["world_size"] == 2
    assert found["best"]["value"] == min(report["curves"]["val_loss"]["value"])
    assert found["best"]["command"] in (tmp_path / "out" / "sweep.html").read_text()

    # A pruned trial is a pruned run.
    assert trials[4]["reason"].startswith("pruned: val_loss = ")
    listed = json.loads(CalledCommand("runs", capsys)("--json").out)["runs"]
    runs = {each["run"]: each["state"] for each in trials if each["run"] is not None}
    assert {each["path"]: each["state"] for each in listed} == runs
    assert len(runs) == 3
    (pruned,) = [each for each in listed if each["state"] == "pruned"]
    assert pruned["epochs"] < 4

    # The second time nothing is left to do.
    assert json.loads(call(*given).out) == found


def test_a_killed_sweep_continues_and_finds_what_an_undisturbed_one_finds(call: CalledCommand, tmp_path: Path) -> None:
    given = sweep_arguments(2, 1, "--", "--pause", "0.05")
    whole = json.loads(call(*given).out)
    (folder := tmp_path / "killed").mkdir()
    (folder / "train.py").write_text(PROGRAM)
    # Its programs are new interpreters. The first trial continues from its checkpoint, the second one has none.
    for moment in ("trial-0/version_0/checkpoints/*.ckpt", "trial-1"):
        with started_script(PHALANX, "sweep", *given, cwd=folder):
            wait_until(lambda: [*folder.glob(f"sweep/{moment}")], 90.0)  # noqa: B023
    done = run_script(PHALANX, "sweep", *given, cwd=folder, timeout=200.0)
    assert done.returncode == 0, done.stdout
    killed = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert compared(killed) == compared(whole)
    assert killed["best"]["parameters"] == whole["best"]["parameters"]
    assert [len([*folder.glob(f"sweep/trial-{number}/version_*")]) for number in range(2)] == [1, 1]


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
