"""The job of a queue that this process belongs to: when it is ended, and how it gets back into the queue. SLURM's.

TimeLimit   has all ranks leave some time before the job is ended, as a signal would
requeue     asks for the job to be run again, where it was told to end by a signal of the user's choice
"""

from __future__ import annotations

import subprocess
import threading
import time
from datetime import timedelta

from ..distributed.control import Triggers
from ..system.launcher_env import Job

NEAR_END = "time limit"
REQUEUED_AT = ("SIGUSR1", "SIGUSR2")
"""What ``sbatch --signal`` sends. SIGTERM comes from a queue that knows by itself what to do with the job."""
_ANSWER_SECONDS = 30.0


class TimeLimit:
    """Raises a trigger ``margin`` before a job is ended; of a job shorter than twice that, at half of its time."""

    def __init__(self, job: Job | None, margin: timedelta) -> None:
        self._end = None if job is None else job.end
        self._margin = margin.total_seconds()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> TimeLimit:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def tell(self, triggers: Triggers, trigger: str) -> None:
        """Start to wait. On one rank: the trigger reaches all of them."""
        if self._end is None:
            return
        left = max(0.0, self._end - time.time())
        self._timer = threading.Timer(max(left - self._margin, left / 2), triggers.post, (trigger, NEAR_END))
        self._timer.daemon = True
        self._timer.start()


def requeue(job: Job) -> str:
    """Put a job back into its queue; return a sentence on what came of it."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job.name], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Job {job.name} was not put back into the queue: {error}."
    if done.returncode:
        return f"Job {job.name} was not put back into the queue: {(done.stderr or done.stdout).strip()}"
    return f"Job {job.name} was put back into the queue."
