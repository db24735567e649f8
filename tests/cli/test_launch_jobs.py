"""``phalanx launch --on slurm|ray|kubernetes``: the files that it writes, what submits them, and what is repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from called_command import CalledCommand, Outcome
from kubeflow_trainer_api import models

from phalanx.cli.job import Job
from phalanx.cli.kubernetes_manifest import kubernetes_documents, kubernetes_manifest, yaml_text
from phalanx.cli.main import build_parser
from phalanx.framework.core.errors import ConfigurationError, Preempted

# Stand-ins for commands of SLURM: each task is known by its arguments, and ends with a code that the test gives.
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    echo "$1" >> options
    shift
done
"$@" > arguments
exit $(cat code)
"""
SCONTROL = '#!/bin/sh\necho "$@" >> scontrol.txt\n'
AWKWARD = "a b'c\"$(PET_NODE_RANK) $x"


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {"nodes": 2, "devices": 4, "max_restarts": 3, "gpus": 4, "image": "registry/image:1"}
    return Job(name="train", script="train.py", directory="/", **{**given, "arguments": ("--lr", "0.1"), **changes})


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Call ``phalanx launch`` in a folder with a script, where tools are looked for in a folder below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return CalledCommand("launch", capfd)


def install(tool: Path, text: str) -> None:
    tool.write_text(text)
    tool.chmod(0o755)


# ---- SLURM


@pytest.mark.parametrize(("nodes", "code", "requeues"), [(2, 75, ["requeue 10007"]), (1, 1, []), (1, 0, [])])
def test_a_slurm_job_passes_arguments_on_as_they_are_and_is_queued_again_after_a_preemption(
    tmp_path: Path, call: Callable[..., Outcome], nodes: int, code: int, requeues: list[str]
) -> None:
    script = call("-n", "2", "--nodes", str(nodes), "--on", "slurm", "train.py", AWKWARD).out
    assert "#SBATCH --ntasks-per-node=1\n" in script
    assert f"#SBATCH --nodes={nodes}\n" in script
    install(tmp_path / "bin" / "srun", SRUN)
    install(tmp_path / "bin" / "scontrol", SCONTROL)
    (tmp_path / "code").write_text(str(code))
    printer = "#!/bin/sh\nexec " + sys.executable + " -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n"
    install(tmp_path / "bin" / "python", printer)
    (tmp_path / "job.sh").write_text(script.replace(sys.executable, str(tmp_path / "bin" / "python")))
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    variables = {**os.environ, **path, "SLURM_JOB_ID": "10007", "SLURM_CPUS_PER_TASK": "7"}
    done = subprocess.run(["/bin/bash", "job.sh"], env=variables, check=False)
    assert done.returncode == code
    assert (tmp_path / "options").read_text().split() == ["--kill-on-bad-exit=0", "--cpus-per-task=7"]
    place = ["--nodes", str(nodes)] if nodes > 1 else []
    given = json.loads((tmp_path / "arguments").read_text())
    assert given == ["-m", "phalanx", "launch", "-n", "2", *place, "train.py", AWKWARD]
    asked = tmp_path / "scontrol.txt"
    assert (asked.read_text().splitlines() if asked.exists() else []) == requeues
    # As documented for jobs that are not to be queued again.
    asked.unlink(missing_ok=True)
    lines = (tmp_path / "job.sh").read_text().splitlines()
    (tmp_path / "job.sh").write_text("\n".join(line for line in lines if "scontrol" not in line))
    assert subprocess.run(["/bin/bash", "job.sh"], env=variables, check=False).returncode == code
    assert not asked.exists()


# ---- Kubernetes


@pytest.mark.parametrize("each", [job(), job(nodes=1, gpus=0, max_restarts=0), job(arguments=(AWKWARD, "1e3", "on"))])
def test_a_manifest_has_the_published_schema(each: Job) -> None:
    runtime, train_job = kubernetes_documents(each)
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job
    assert list(yaml.safe_load_all(kubernetes_manifest(each))) == [runtime, train_job]


def test_a_pod_starts_the_launcher_of_its_node() -> None:
    trainer = kubernetes_documents(job(arguments=("--lr", AWKWARD)))[1]["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "phalanx", "launch"]
    variables = {"$$(": "\0", "$(PET_NODE_RANK)": "1", "$(PET_MASTER_ADDR)": "train-0", "$(PET_MASTER_PORT)": "29500"}
    arguments = trainer["args"]
    for name, value in variables.items():
        arguments = [each.replace(name, value) for each in arguments]
    given = build_parser().parse_args(["launch", *(each.replace("\0", "$(") for each in arguments)])
    assert (given.nodes, given.node_rank, given.rdzv, given.devices) == ("2", 1, "train-0:29500", 4)
    assert (given.max_restarts, given.script, given.arguments) == (3, "train.py", ["--lr", AWKWARD])
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert "resourcesPerNode" not in kubernetes_documents(job(gpus=0))[1]["spec"]["trainer"]


def test_a_pod_that_was_preempted_is_replaced_and_a_configuration_error_is_final() -> None:
    (replicated,) = kubernetes_documents(job())[0]["spec"]["template"]["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert actions[Preempted.exit_code] == "Ignore"
    assert actions[ConfigurationError.exit_code] == "FailJob"
    # Others are repeated by the set of jobs, which counts them.
    assert 1 not in actions
    assert kubernetes_documents(job())[0]["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_a_manifest_is_created_by_kubectl(tmp_path: Path, call: Callable[..., Outcome]) -> None:
    install(tmp_path / "bin" / "kubectl", '#!/bin/sh\necho "$@" > called\n/bin/cp "$3" created\n')
    done = call("-n", "4", "--on", "kubernetes", "--image", "img", "--name", "My Run 1", "--submit", "train.py")
    assert (done.code, done.out, done.err) == (0, "", "")
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
def test_a_tool_that_is_missing_or_fails(
    tmp_path: Path, call: Callable[..., Outcome], platform: str, tool: str
) -> None:
    options = ["-n", "1", "--on", platform, "--submit", *(["--image", "img"] if platform == "kubernetes" else [])]
    done = call(*options, "train.py")
    assert done.code == 78
    assert done.err.startswith(f"phalanx: --submit needs {tool}, which is not on PATH")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bin", "train.py"]
    install(tmp_path / "bin" / tool, "#!/bin/sh\nexit 3\n")
    done = call(*options, "train.py")
    assert done.code == 1
    assert done.err.startswith(f"phalanx: {tool} has failed with exit code 3; the job is in train.")


def test_a_job_is_written_to_a_file_or_described(tmp_path: Path, call: Callable[..., Outcome]) -> None:
    written = call("-n", "2", "--on", "slurm", "-o", "a.sbatch", "train.py")
    assert (written.code, written.out) == (0, "a.sbatch is written. To submit it: sbatch a.sbatch\n")
    described = {
        "schema": 1,
        "platform": "slurm",
        "name": "train",
        "file": None,
        "text": (tmp_path / "a.sbatch").read_text(),
        "submit": None,
        "submitted": False,
        "answer": None,
    }
    assert json.loads(call("-n", "2", "--on", "slurm", "--json", "train.py").out) == described
    install(tmp_path / "bin" / "sbatch", '#!/bin/sh\necho "Submitted batch job 7"\n')
    submitted = json.loads(call("-n", "2", "--on", "slurm", "--json", "--submit", "train.py").out)
    command, answer = ["sbatch", "train.sbatch"], "Submitted batch job 7\n"
    assert submitted == {**described, "file": "train.sbatch", "submit": command, "submitted": True, "answer": answer}
    assert (tmp_path / "train.sbatch").read_text() == described["text"]
