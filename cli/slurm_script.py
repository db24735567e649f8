"""``slurm_script``: the batch script of a job for SLURM."""

from __future__ import annotations

import shlex

from ..framework.core.errors import Preempted
from .job import Job

# Below the range from which the kernel assigns ports; jobs that share a host have different ones.
_FIRST_PORT, _NUM_PORTS = 20000, 10000


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
    header = "\n".join(f"#SBATCH {shlex.quote(directive)}" for directive in directives)
    return f"""#!/bin/bash
{header}

{_start(job)}
code=$?

# {Preempted.exit_code}: preempted, or near the time limit, and saved. The job resumes in its next turn.
if [ "$code" -eq {Preempted.exit_code} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _start(job: Job) -> str:
    # The launchers of all nodes agree on an exit code: none must be killed because another has ended. srun does not
    # take the number of cores from the job.
    srun = 'srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    if job.nodes == 1:
        return f"{srun} {shlex.join(job.command())}"
    # Quoted twice: the number of a node is known to its own task alone.
    rank, address = "__NODE__", "__ADDRESS__"
    command = shlex.join(job.command("--nodes", str(job.nodes), "--node-rank", rank, "--rdzv", address))
    inner = "exec " + command.replace(rank, '"$SLURM_NODEID"').replace(address, '"$0"')
    return f"""host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))
{srun} bash -c {shlex.quote(inner)} "$host:$port\""""
