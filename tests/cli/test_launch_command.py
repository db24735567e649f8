"""``phalanx launch`` on one node: ranks, exit codes, restarts, and answers to wrong arguments."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import launched_fit
import pytest
from called_command import CalledCommand
from launched_nodes import LAUNCH, RANK, started
from model_script import MODEL
from ranks import run_command, run_script

from phalanx.cli import rank_launch
from phalanx.cli.main import main
from phalanx.framework.launch.launch_context import NodeOptions

# A fit that resumes from its newest checkpoint.
RESUMED = f"""{MODEL}
data = loader(4, batch_size=2)
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False)
trainer.fit(Model(), data, ckpt_path="auto")
"""


# The rank is killed in the second of two fits.
TWO_FITS = (
    RESUMED.partition("trainer =")[0]
    + """
class Killed(Model):
    def training_step(self, batch, index):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)

for model in (Model(), Killed()):
    Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False).fit(model, data)
"""
)


# Killed three steps after the checkpoint at the end of the first epoch, by when a snapshot since then is complete.
RESCUED = TWO_FITS.replace("global_step == 2", "global_step == 7").replace("(Model(), Killed())", "[Killed()]")
RESCUED = RESCUED.replace("max_epochs=2,", "max_epochs=2, **eval(os.sys.argv[1]),").replace("size=2", "size=1")


# Both ask for restarts that only the launcher could make.
ASKS = (
    RESUMED.partition("trainer =")[0]
    + """
from phalanx import Fabric

Fabric(accelerator="cpu", devices=1, max_restarts=2).launch()
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
Trainer(accelerator="cpu", devices=1, max_epochs=1, max_restarts=3, **quiet).fit(Model(), data)
"""
)


@pytest.fixture
def rank_script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def test_a_killed_rank_ends_the_others_and_all_start_again(tmp_path: Path, rank_script: Path) -> None:
    options = ["-n", "2", "--max-restarts", "1"]
    done = run_script(LAUNCH, *options, str(rank_script), str(tmp_path), "kill", "1", "--lr", "0.1", "-n", "7")
    assert done.returncode == 0, done.stdout
    assert started(tmp_path) == {
        f"rank_{rank}_{attempt}": [str(rank), "2", str(rank), "2", "0", "1", "--lr", "0.1", "-n", "7"]
        for rank in (0, 1)
        for attempt in (0, 1)
    }
    assert "was killed by SIGKILL" in done.stdout


def test_restarts_that_a_script_requests_and_its_launcher_does_not_make_are_noted(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    without = run_script(LAUNCH, "-n", "1", "asks.py", cwd=tmp_path)
    assert without.returncode == 0, without.stdout
    for asked in ("Fabric(max_restarts=2) has no effect on this run", "--max-restarts 3"):
        assert asked in without.stdout
    restarted = run_script(LAUNCH, "-n", "1", "--max-restarts", "1", "asks.py", cwd=tmp_path)
    assert restarted.returncode == 0, restarted.stdout
    assert "no effect" not in restarted.stdout


def test_the_command_that_resumes_a_launched_fit_runs_as_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESUMED)
    # As the installer writes it.
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "phalanx"
    program.write_text("import sys\nfrom phalanx.cli.main import main\nsys.exit(main())\n")
    first = run_script(program, "launch", "-n", "1", "train.py", cwd=tmp_path)
    assert first.returncode == 0, first.stdout
    _, _, below = first.stdout.partition("with a higher limit:\n")
    command = below.splitlines()[0].strip()
    assert command.endswith("launch -n 1 train.py")
    again = run_command(["bash", "-c", command], tmp_path)
    assert again.returncode == 0, again.stdout
    assert "resumes    " in again.stdout


@pytest.mark.parametrize(
    ("fault", "step", "lost"),
    # Every second step is saved, step 4 after the hook that fails.
    [
        (["raise", "1", "3"], 3, 1),
        (["kill", "1", "3"], 3, 1),
        (["kill", "0", "3"], 3, 1),
        (["end", "1", "4"], 4, 2),
        (["end", "0", "3"], 3, 1),
    ],
)
def test_why_has_the_rank_and_the_step_of_the_launcher(
    tmp_path: Path, fault: list[str], step: int, lost: int, capsys: pytest.CaptureFixture[str]
) -> None:
    script = launched_fit.__file__
    done = run_script(LAUNCH, "-n", "2", script, str(tmp_path), *fault, env={"OMP_NUM_THREADS": "1"})
    how = "was killed by SIGKILL" if fault[0] == "kill" else "failed"
    assert done.returncode == (128 + signal.SIGKILL if fault[0] == "kill" else 1), done.stdout
    where = rf"at step {step} \(epoch 0, batch {step}\)"
    named = re.search(rf"^rank {fault[1]} \(pid \d+\) {how} {where}", done.stdout, re.M)
    assert named, done.stdout
    why = json.loads(CalledCommand("why", capsys)(tmp_path, "--json").out)["why"]
    assert named.group() in why["sentence"]
    assert (why["step"], why["lost_steps"]) == (step, lost)
    # The whole command, not that of a single rank.
    assert f"-n 2 {script}" in why["resume"]


def test_a_failure_is_recorded_in_the_run_that_was_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TWO_FITS)
    assert run_script(LAUNCH, "-n", "1", "train.py", cwd=tmp_path).returncode == 128 + signal.SIGKILL
    why = CalledCommand("why", capsys)
    first, second = (json.loads(why(tmp_path / f"phalanx_logs/version_{n}", "--json").out) for n in range(2))
    assert (first["state"], first["why"]["step"]) == ("finished", 4)
    assert (second["exit_code"], second["why"]["step"]) == (128 + signal.SIGKILL, 2)
    assert second["why"]["lost"] == "nothing lost: epoch=0-step=2.ckpt (step 2) is good"


@pytest.mark.parametrize(("given", "count"), [("{}", 0), ("{'snapshots': 1}", 1)])
def test_snapshots_that_a_launched_script_asks_for_are_rescued(tmp_path: Path, given: str, count: int) -> None:
    (tmp_path / "train.py").write_text(RESCUED)
    done = run_script(LAUNCH, "-n", "1", "train.py", given, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert "has no effect" not in done.stdout
    assert len([*tmp_path.rglob("rescued.ckpt")]) == count


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--nodes 0 train.py", "--nodes 0 must be a whole number of at least 1, or two of them such as 2:4."),
        ("--nodes 3:2 train.py", "--nodes 3:2 must be a whole number of at least 1, or two of them such as 2:4."),
        ("--spares -1 train.py", "--spares -1 must be a whole number of at least 0."),
        ("-n 0 train.py", "--devices 0 must be a whole number of at least 1."),
        ("--max-restarts -1 train.py", "--max-restarts -1 must be a whole number of at least 0."),
        ("-n two train.py", "argument -n/--devices: invalid int value: 'two'."),
        ("trian.py", "There is no script 'trian.py'. Did you mean 'train.py'?"),
        (".", "'.' is a directory"),
        ("", "the following arguments are required: SCRIPT."),
        ("--nods 2 train.py", "'--nods' is not known here. Did you mean '--nodes'?"),
        ("--on slrm train.py", "'slrm' is not a known --on. Did you mean 'slurm'?"),
        ("--nodes 2 train.py", "--nodes 2 needs --rdzv HOST:PORT: run the command on each node"),
        ("--nodes 2 --rdzv a:1 train.py", "--nodes 2 needs --node-rank K"),
        ("--nodes 2 --node-rank 2 --rdzv a:1 train.py", "--node-rank 2 of --nodes 2 must be below 2."),
        ("--nodes 1:2 --spares 1 --node-rank 3 --rdzv a:1 train.py", "--node-rank 3 of --nodes 1:2 --spares 1 must be"),
        ("--nodes 2 --node-rank 0 --rdzv host-a train.py", "--rdzv 'host-a' must be of the form HOST:PORT"),
        ("--node-rank 1 --rdzv a:1 train.py", "--rdzv and --node-rank are for several nodes"),
        ("-o job train.py", "--output is for a job: give --on slurm, ray or kubernetes as well."),
        ("--on slurm train.py", "--on slurm needs -n, the number of ranks on each node."),
        ("--on slurm -n 2 --node-rank 1 train.py", "--node-rank and --rdzv have no place in a job"),
        ("--on slurm -n 2 --nodes 1:2 train.py", "--nodes MIN:MAX and --spares are for launches without --on"),
        ("--on slurm -n 2 --image x train.py", "--on slurm takes no --image."),
        ("--on kubernetes -n 2 train.py", "--on kubernetes needs --image, a container image with the script."),
        ("--on slurm -n 2 --name 42 train.py", "--name '42' has no letter"),
        ("--on slurm -n 2 -o train.py train.py", "'train.py' exists: remove it, or give another name with -o FILE."),
    ],
)
def test_wrong_arguments_are_answered_by_a_sentence(
    tmp_path: Path, given: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    done = CalledCommand("launch", capsys)(*given.split())
    assert (done.code, done.out, done.err.count("\n")) == (78, "", 1)
    assert done.err.startswith(f"phalanx: {sentence}")


@pytest.mark.parametrize(
    ("variables", "rank", "address"),
    [
        ({"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}, 1, ("a", 9)),
        (
            {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9", "options": "--node-rank 0 --rdzv b:8"},
            0,
            ("b", 8),
        ),
        ({"MASTER_ADDR": "fe80::1", "MASTER_PORT": "9", "options": "--node-rank 1"}, 1, ("fe80::1", 9)),
    ],
)
def test_the_place_of_a_node_is_read_from_variables(
    tmp_path: Path, variables: dict[str, str], rank: int, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    asked: list[Any] = []

    def note(*given: Any) -> int:
        asked.append(given[-1])
        return 0

    monkeypatch.setattr(rank_launch, "launch_ranks", note)
    options = variables.pop("options", "").split()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--nodes", "2", *options, str(tmp_path / "train.py")]) == 0
    assert asked == [NodeOptions(rank, 2, 2, 0, *address)]


def test_a_rank_that_launches_ranks_is_refused(
    rank_script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = CalledCommand("launch", capsys)("-n", "2", rank_script)
    assert done.code == 78
    assert "torchrun has started this process as rank 1 of 2" in done.err
