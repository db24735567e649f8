"""``phalanx launch --on slurm|ray|kubernetes``: the files that it writes, what submits them, and what is repeated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import slurm_stand_in
import yaml
from free_ports import FIRST, free_port
from kubeflow_trainer_api import models
from ranks import run_command

from phalanx.cli.job import Job
from phalanx.cli.kubernetes_manifest import documents, kubernetes_manifest
from phalanx.cli.main import build_parser, main
from phalanx.cli.yaml_text import yaml_text
from phalanx.framework.core.errors import ConfigurationError, Preempted

# Ends with the code that is given for this turn of the job, on one rank.
TURN = """
import os, pathlib, sys
folder, turn, rank = pathlib.Path(sys.argv[1]), int(os.environ["SLURM_RESTART_COUNT"]), os.environ["RANK"]
(folder / f"rank_{rank}_of_{os.environ['WORLD_SIZE']}_turn_{turn}").touch()
sys.exit(int(sys.argv[2 + turn]))
"""
AWKWARD = "a b'c\"$(PET_NODE_RANK) $x"


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {"nodes": 2, "devices": 4, "max_restarts": 3, "gpus": 4, "image": "registry/image:1"}
    return Job(name="train", script="train.py", directory="/", **{**given, "arguments": ("--lr", "0.1"), **changes})


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", "launch", *arguments]


# ---- SLURM


@pytest.mark.parametrize(("nodes", "codes", "turns"), [(2, ["75", "0"], [75, 0]), (1, ["1", "0"], [1])])
def test_a_slurm_job_that_was_preempted_is_queued_again(
    tmp_path: Path, nodes: int, codes: list[str], turns: list[int]
) -> None:
    (tmp_path / "train.py").write_text(TURN)
    (tmp_path / "bin").mkdir()
    variables = slurm_stand_in.install(tmp_path / "bin", job=free_port() - FIRST)
    options = ["-n", "1", "--nodes", str(nodes), "--on", "slurm", "--cpu", "--submit", "--json"]
    done = run_command(command(*options, "train.py", str(tmp_path), *codes), tmp_path, variables, timeout=120.0)
    printed = (tmp_path / f"train-{variables['SLURM_STAND_IN_JOB']}.out").read_text()
    assert done.returncode == 0, done.stdout
    assert [int(code) for code in (tmp_path / "bin" / slurm_stand_in.CODES).read_text().split()] == turns, printed
    started = sorted(path.name for path in tmp_path.glob("rank_*"))
    expected = [f"rank_{rank}_of_{nodes}_turn_{turn}" for rank in range(nodes) for turn in range(len(turns))]
    assert started == expected
    document = json.loads(done.stdout)
    assert (document["platform"], document["file"], document["submitted"]) == ("slurm", "train.sbatch", True)
    assert document["answer"] == f"Submitted batch job {variables['SLURM_STAND_IN_JOB']}\n"
    assert document["text"] == (tmp_path / "train.sbatch").read_text()


def test_a_slurm_script_passes_arguments_on_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that a shell would read in another way, through two of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in slurm_stand_in.COMMANDS:
        (tmp_path / name).write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho host-a\n")
    printer = "#!/bin/sh\nexec " + sys.executable + " -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n"
    (tmp_path / "python").write_text(printer)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    # The default of the method was read when its class was made.
    monkeypatch.setattr(Job.command, "__kwdefaults__", {"python": str(tmp_path / "python")})
    assert main(["launch", "-n", "2", "--nodes", "2", "--on", "slurm", "train.py", AWKWARD]) == 0
    (tmp_path / "job.sh").write_text(capsys.readouterr().out)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "10007", "SLURM_JOB_NODELIST": "host-[a-b]"}
    done = run_command(["bash", "job.sh"], tmp_path, {**variables, "SLURM_NODEID": "1"})
    place = ["--nodes", "2", "--node-rank", "1", "--rdzv", "host-a:20007"]
    assert json.loads(done.stdout) == ["-m", "phalanx", "launch", "-n", "2", *place, "train.py", AWKWARD]


# ---- Kubernetes


@pytest.mark.parametrize("each", [job(), job(nodes=1, gpus=0, max_restarts=0), job(arguments=(AWKWARD, "1e3", "on"))])
def test_a_manifest_has_the_published_schema(each: Job) -> None:
    runtime, train_job = documents(each)
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job
    assert list(yaml.safe_load_all(kubernetes_manifest(each))) == [runtime, train_job]


def test_a_pod_starts_the_launcher_of_its_node() -> None:
    trainer = documents(job(arguments=("--lr", AWKWARD)))[1]["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "phalanx", "launch"]
    variables = {"$$(": "\0", "$(PET_NODE_RANK)": "1", "$(PET_MASTER_ADDR)": "train-0", "$(PET_MASTER_PORT)": "29500"}
    arguments = trainer["args"]
    for name, value in variables.items():
        arguments = [each.replace(name, value) for each in arguments]
    given = build_parser().parse_args(["launch", *(each.replace("\0", "$(") for each in arguments)])
    assert (given.nodes, given.node_rank, given.rdzv, given.devices) == (2, 1, "train-0:29500", 4)
    assert (given.max_restarts, given.script, given.arguments) == (3, "train.py", ["--lr", AWKWARD])
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert "resourcesPerNode" not in documents(job(gpus=0))[1]["spec"]["trainer"]


def test_a_pod_that_was_preempted_is_replaced_and_a_configuration_error_is_final() -> None:
    (replicated,) = documents(job())[0]["spec"]["template"]["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert actions[Preempted.exit_code] == "Ignore"
    assert actions[ConfigurationError.exit_code] == "FailJob"
    # Others are repeated by the set of jobs, which counts them.
    assert 1 not in actions
    assert documents(job())[0]["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_a_manifest_is_created_by_kubectl(tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "$@" > called\ncp "$3" created\n')
    (tmp_path / "kubectl").chmod(0o755)
    options = ["-n", "4", "--on", "kubernetes", "--image", "img", "--name", "My Run 1", "--submit"]
    done = run_command(command(*options, "train.py"), tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "called").read_text() == "create -f my-run-1.yaml\n"
    names = [each["metadata"]["name"] for each in yaml.safe_load_all((tmp_path / "created").read_text())]
    assert names == ["my-run-1", "my-run-1"]


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, {"b": [], "c": {}}], "y": "on", "1e3": "1e3"},
        {"t": "2020-01-01", "n": "null", "s": "a: b #c", "e": ""},
    ],
)
def test_yaml_is_read_as_it_was_meant(value: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


# ---- all platforms


@pytest.mark.parametrize(("platform", "tool"), [("slurm", "sbatch"), ("ray", "ray"), ("kubernetes", "kubectl")])
def test_a_tool_that_is_missing_or_fails(tmp_path: Path, platform: str, tool: str) -> None:
    (tmp_path / "train.py").touch()
    options = ["-n", "1", "--on", platform, "--submit", *(["--image", "img"] if platform == "kubernetes" else [])]
    path = {"PATH": str(tmp_path)}
    done = run_command(command(*options, "train.py"), tmp_path, path)
    assert done.returncode == 78
    assert done.stdout.startswith(f"phalanx: --submit needs {tool}, which is not on PATH")
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]
    (tmp_path / tool).write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / tool).chmod(0o755)
    done = run_command(command(*options, "train.py"), tmp_path, path)
    assert done.returncode == 1
    assert done.stdout.startswith(f"phalanx: {tool} has failed with exit code 3; the job is in train.")


def test_a_job_is_written_to_a_file_or_described(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    written = run_command(command("-n", "2", "--on", "slurm", "-o", "a.sbatch", "train.py"), tmp_path)
    assert (written.returncode, written.stdout) == (0, "a.sbatch is written. To submit it: sbatch a.sbatch\n")
    described = run_command(command("-n", "2", "--on", "slurm", "--json", "train.py"), tmp_path)
    assert json.loads(described.stdout) == {
        "schema": 1,
        "platform": "slurm",
        "name": "train",
        "file": None,
        "text": (tmp_path / "a.sbatch").read_text(),
        "submit": None,
        "submitted": False,
        "answer": None,
    }
