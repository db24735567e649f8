"""``slurm_script``: the batch script of a job for SLURM."""

from __future__ import annotations

import shlex
import sys

from ..framework.core.errors import Preempted
from .job import LAUNCHER, Job


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
    command = shlex.join([sys.executable, *LAUNCHER, *job.options, *nodes, *job.program])
    header = "\n".join(f"#SBATCH {shlex.quote(directive)}" for directive in directives)
    return f"""#!/bin/bash
{header}

# The launchers of all nodes agree on an exit code: none must be killed because another has ended.
# srun does not take the number of cores from the job.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" {command}
code=$?

# {Preempted.exit_code}: preempted, or near the time limit, and saved. The job resumes in its next turn.
if [ "$code" -eq {Preempted.exit_code} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
