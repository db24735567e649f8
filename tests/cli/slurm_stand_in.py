"""Stand-ins of SLURM's commands: a queue with one job, all of whose nodes are this machine.

    slurm_stand_in.py sbatch FILE             run the job, and again as long as it is put back into the queue
    slurm_stand_in.py srun [OPTION...] COMMAND...
    slurm_stand_in.py scontrol requeue JOB | show hostnames LIST

The folder that SLURM_STAND_IN names holds the exit code of each turn of the job.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol")
CODES, REQUEUED = "codes", "requeued"


def install(folder: Path, job: int) -> dict[str, str]:
    """Make the commands in a folder; return the variables with which they are found."""
    for name in COMMANDS:
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__, name])} "$@"\n')
        command.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_STAND_IN": str(folder),
        "SLURM_STAND_IN_JOB": str(job),
    }


def sbatch(file: str) -> int:
    """Run a job until it is not put back into the queue; write the exit code of each turn to the file ``codes``."""
    folder, job = Path(os.environ["SLURM_STAND_IN"]), os.environ["SLURM_STAND_IN_JOB"]
    lines = [line for line in Path(file).read_text().splitlines() if line.startswith("#SBATCH ")]
    options = dict(shlex.split(line)[1].removeprefix("--").partition("=")[::2] for line in lines)
    print(f"Submitted batch job {job}", flush=True)
    for turn in range(5):
        variables = {
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": f"node[1-{options['nodes']}]",
            "SLURM_JOB_NUM_NODES": options["nodes"],
            "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
            "SLURM_RESTART_COUNT": str(turn),
        }
        with Path(options["chdir"], options["output"].replace("%j", job)).open("ab") as output:
            environment = {**os.environ, **variables}
            done = subprocess.run(
                ["bash", file], cwd=options["chdir"], env=environment, stdout=output, stderr=output, check=False
            )
        with (folder / CODES).open("a") as codes:
            codes.write(f"{done.returncode}\n")
        if not (folder / REQUEUED).exists():
            return 0
        (folder / REQUEUED).unlink()
    return 1


def srun(arguments: Sequence[str]) -> int:
    """Run a command once on each node; return the highest exit code."""
    command = list(arguments)
    assert f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}" in command
    while command[0].startswith("-"):
        del command[0]
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks = []
    for node in range(nodes):
        variables = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_NTASKS": str(nodes)}
        variables |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_LOCALID": "0"}
        tasks.append(subprocess.Popen(command, env={**os.environ, **variables}))
    return max(task.wait() for task in tasks)


def scontrol(arguments: Sequence[str]) -> int:
    """Put the job back into the queue, or print the address of each node."""
    if arguments[0] == "requeue":
        assert arguments[1] == os.environ["SLURM_JOB_ID"]
        Path(os.environ["SLURM_STAND_IN"], REQUEUED).touch()
    else:
        assert list(arguments) == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        print("127.0.0.1\n" * int(os.environ["SLURM_JOB_NUM_NODES"]), end="")
    return 0


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    sys.exit(sbatch(*given) if name == "sbatch" else srun(given) if name == "srun" else scontrol(given))
