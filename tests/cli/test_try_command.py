"""``phalanx try``: real programs, their verdicts against earlier runs, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from called_command import CalledCommand, start_programs_warm
from messages import says
from sweep_trials import PROGRAM

GIVEN = ["train.py", "--budget", "100s", "--metric", "val_loss"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalledCommand:
    monkeypatch.chdir(tmp_path)
    start_programs_warm(monkeypatch)
    (tmp_path / "train.py").write_text(PROGRAM)
    return CalledCommand("try", capsys)


def tried(call: CalledCommand, *arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(*GIVEN, "--json", *arguments).out)
    return found


def test_a_change_is_better_by_paired_seeds_and_worse_the_other_way(call: CalledCommand, tmp_path: Path) -> None:
    for command in (
        ["init", "-q"],
        ["add", "train.py"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "1"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    first = tried(call, "--", "--lr", "0.0001")
    assert (first["status"], first["verdict"], first["against"]) == ("finished", "first", None)
    assert (len(first["commit"]), first["dirty"], first["steps"]) == (40, False, 32)
    assert first["peak_memory_bytes"] > 1 << 20

    # One run each: however large the difference, the noise is not known.
    lone = tried(call, "--", "--lr", "0.1")
    assert (lone["verdict"], lone["noise"]) == ("within noise", None)
    assert lone["difference"] < 0

    slow = tried(call, "--seeds", 3, "--against", first["runs"][0]["run"], "--", "--lr", "0.0001")
    assert slow["verdict"] == "within noise"
    assert slow["runs"][0]["value"] == first["value"]
    assert len({run["seed"] for run in slow["runs"]}) == 3
    fast = tried(call, "--seeds", 3, "--against", first["runs"][0]["run"], "--", "--lr", "0.1")
    assert (fast["verdict"], fast["because"]) == ("better", "3 pairs of runs with the same seed")
    assert fast["against"]["value"] == pytest.approx(sum(run["value"] for run in slow["runs"]) / 3)
    assert abs(fast["difference"]) > fast["noise"]

    # The best earlier configuration is the one with the mean of its three runs.
    (tmp_path / "train.py").write_text(PROGRAM.replace("Dropout(0.1)", "Dropout(0.9)"))
    worse = tried(call, "--", "--lr", "0.0001")
    assert (worse["dirty"], worse["verdict"]) == (True, "worse")
    assert worse["because"] == "1 new and 3 earlier runs, unpaired"
    assert worse["against"]["value"] == pytest.approx(fast["value"])


def test_a_program_that_fails_has_the_sentence_of_why(call: CalledCommand, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("time.sleep(self.seconds)", "raise ValueError('planted')"))
    done = call(*GIVEN, "--json")
    found = json.loads(done.out)
    assert (done.code, found["status"], found["verdict"], found["value"]) == (1, "failed", None, None)
    assert found["why"].endswith("ValueError: planted")


def test_a_run_ends_with_its_budget(call: CalledCommand) -> None:
    done = call("train.py", "--budget", "6s", "--metric", "val_loss", "--json", "--", "--epochs", 2000, "--pause", 0.01)
    found = json.loads(done.out)
    assert (done.code, found["status"], found["verdict"]) == (0, "budget", "first")
    assert found["value"] is not None
    assert 0 < found["steps"] < 2000 * 8
    assert found["seconds"] >= 6


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["train.py", "--budget", "5", "--metric", "loss"], "--budget '5'"),
        (["train.py", "--budget", "0s", "--metric", "loss"], "--budget '0s'"),
        (["train.py", "--budget", "5m", "--metric", "val_acc"], "--mode max"),
        ([*GIVEN, "--seeds", "0"], "--seeds 0"),
        ([*GIVEN, "--against", "version_9"], "'version_9'"),
        (["trian.py", *GIVEN[1:]], "train.py"),
        ([*GIVEN, "--sedes", "2"], "--seeds"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    call: CalledCommand, tmp_path: Path, arguments: list[str], name: str
) -> None:
    done = call(*arguments)
    assert done.code == 78
    says(done.err, name)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
