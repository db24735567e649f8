"""``write_job`` and ``submit_job``: the file of a job for a platform, and the tool that submits it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..framework.core.errors import ConfigurationError, PhalanxError, Preempted, StorageError
from ..framework.system.launcher_env import REQUEUES
from .job import LAUNCHER, Job
from .kubernetes_manifest import kubernetes_manifest
from .terminal_text import say, say_json

# ---- SLURM ----------------------------------------------------------------------------------------------------------


def slurm_script(job: Job) -> str:
    """Return the batch script: one launcher on each node, and the job is queued again after a preemption."""
    directives = [
        f"--job-name={job.name}",
        f"--chdir={job.directory}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.devices}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        f"--output={job.name}-%j.out",
        "--open-mode=append",
        "--requeue",
    ]
    # The launcher reads the number of its node, and the address of node 0, from the variables of srun.
    nodes = ["--nodes", str(job.nodes)] if job.nodes > 1 else []
    # In the command, since sbatch --export=NONE keeps variables of the job file from the tasks. With the number of the
    # job, since a job that the run submits has its variables, too.
    command = shlex.join([sys.executable, *LAUNCHER, *job.options, *nodes, *job.program])
    command = f'env {REQUEUES}="$SLURM_JOB_ID" {command}'
    header = "\n".join(f"#SBATCH {shlex.quote(directive)}" for directive in directives)
    return f"""#!/bin/bash
{header}

# The launchers of all nodes agree on an exit code: none must be killed because another has ended.
# srun does not take the number of cores from the job.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" {command}
code=$?

# {Preempted.exit_code}: preempted, or near the time limit, and saved. The job resumes in its next turn.
[ "$code" -ne {Preempted.exit_code} ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


# ---- Ray ------------------------------------------------------------------------------------------------------------

_RAY_IMPORTS = """
import os
import socket
import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.framework.system.processes import die_with_parent

"""
_RAY_FUNCTIONS = '''

class Node:
    """Runs the launcher of one node."""

    def address(self):
        with socket.create_server(("", 0)) as free:
            return f"{get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, rank, address, directory):
        several = ["--nodes", str(NODES), "--node-rank", str(rank), "--rdzv", address] if NODES > 1 else []
        command = [sys.executable, *LAUNCH, *several, *SCRIPT]
        # The working directory is shared, or else Ray has copied it. Ray may kill this process alone.
        place = directory if os.path.isdir(directory) else None
        return subprocess.run(command, cwd=place, preexec_fn=die_with_parent()).returncode


def run_once():
    """Run the script on all nodes; return its exit code, or LOST if Ray lost a node."""
    group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
    try:
        if not group.wait(WAIT_SECONDS):
            print(f"the run waits for {NODES} nodes with {RESOURCES} each", flush=True)
        ray.get(group.ready())
        nodes = [
            ray.remote(Node)
            .options(
                num_cpus=RESOURCES["CPU"],
                num_gpus=RESOURCES.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
            for rank in range(NODES)
        ]
        address = ray.get(nodes[0].address.remote())
        # The launchers agree on an exit code.
        return max(ray.get([node.run.remote(rank, address, os.getcwd()) for rank, node in enumerate(nodes)]))
    except ray.exceptions.RayActorError:
        return LOST
    finally:
        remove_placement_group(group)


def main():
    ray.init()
    losses = 0
    while True:
        code = run_once()
        if code == LOST:
            losses += 1
            if losses > MAX_LOSSES:
                return FAILED
        elif code != PREEMPTED:
            return code
        print("the run is started again, from its newest checkpoint", flush=True)


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_job(job: Job) -> str:
    """Return a script that runs a launcher on each node of a Ray cluster, and runs them again after a preemption."""
    resources = {"CPU": job.devices, **({"GPU": job.gpus} if job.gpus else {})}
    return f'''"""A job for Ray: {job.name}. Its exit code is that of the run."""
{_RAY_IMPORTS}NODES = {job.nodes}
# For each node.
RESOURCES = {resources!r}
# The launcher and its options; the script and its arguments.
LAUNCH = {[*LAUNCHER, *job.options]!r}
SCRIPT = {job.program!r}
# Losses of a node after which the run is started again.
MAX_LOSSES = {job.max_restarts}
WAIT_SECONDS = 10
PREEMPTED, FAILED = {Preempted.exit_code}, 1
# In place of an exit code.
LOST = -1
{_RAY_FUNCTIONS}'''


# ---- all platforms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Platform:
    """A platform that runs jobs: the content of its file, and the command that submits the file."""

    text: Callable[[Job], str]
    ending: str
    command: Callable[[str], list[str]]


PLATFORMS = {
    "slurm": Platform(slurm_script, "sbatch", lambda file: ["sbatch", file]),
    # The working directory is copied to the cluster, the file with it.
    "ray": Platform(
        ray_job,
        "ray.py",
        lambda file: ["ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "python", file],
    ),
    "kubernetes": Platform(kubernetes_manifest, "yaml", lambda file: ["kubectl", "create", "-f", file]),
}


def write_job(job: Job, platform: str, output: str | None, as_json: bool) -> int:
    """Write a job to a file, or to standard output; return the exit code. ``as_json``: describe it in JSON instead.

    Raises:
        ConfigurationError: the file exists.
        StorageError: it cannot be written.
    """
    chosen = PLATFORMS[platform]
    text = chosen.text(job)
    if output is not None:
        _write(output, text)
    if as_json:
        _say_json(job, platform, output, text)
    elif output is None:
        sys.stdout.write(text)
    else:
        say(f"{output} is written. To submit it: {shlex.join(chosen.command(output))}")
    return 0


def submit_job(job: Job, platform: str, output: str | None, as_json: bool) -> int:
    """Write a job to a file, by default one in the working directory, and submit it; return the exit code.

    The tool's answer is printed, or with ``as_json`` a part of the JSON that describes the job.

    Raises:
        ConfigurationError: the platform's tool is missing, or the file exists.
        StorageError: the file cannot be written.
        PhalanxError: the tool has failed.
    """
    chosen = PLATFORMS[platform]
    file = output or f"{job.name}.{chosen.ending}"
    command = chosen.command(file)
    tool = shutil.which(command[0])
    if tool is None:
        raise ConfigurationError(
            f"--submit needs {command[0]}, which is not on PATH: write the job with -o FILE, and submit it from a host "
            "that has it."
        )
    if platform == "ray" and os.path.relpath(file).startswith(os.pardir):
        raise ConfigurationError(f"--output {file!r} must be below the working directory, which Ray copies.")
    text = chosen.text(job)
    _write(file, text)
    output_to = subprocess.PIPE if as_json else None
    done = subprocess.run([tool, *command[1:]], stdin=subprocess.DEVNULL, stdout=output_to, text=True, check=False)
    if done.returncode != 0:
        raise PhalanxError(f"{command[0]} has failed with exit code {done.returncode}; the job is in {file}.")
    if as_json:
        _say_json(job, platform, file, text, done.stdout)
    return 0


def _say_json(job: Job, platform: str, file: str | None, text: str, answer: str | None = None) -> None:
    command = None if file is None else PLATFORMS[platform].command(file)
    described = {"schema": 1, "platform": platform, "name": job.name, "file": file, "text": text}
    say_json({**described, "submit": command, "submitted": answer is not None, "answer": answer})


def _write(file: str, text: str) -> None:
    try:
        with open(file, "x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError:
        raise ConfigurationError(f"{file!r} exists: remove it, or give another name with -o FILE.") from None
    except OSError as error:
        raise StorageError(f"{file!r} cannot be written: {error.strerror}.") from None
