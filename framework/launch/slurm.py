"""The SLURM job of this process: its time limit, and requeueing.

TimeLimit   makes all ranks save and end some time before the job's time limit, as a signal would
requeue     puts the job back into the queue, after a signal that the user chose

One place requeues a job: the job file of ``phalanx launch``, after the launchers have ended, and else rank 0.
"""

from __future__ import annotations

import subprocess
import threading
import time
from datetime import timedelta

from ..distributed.control import Triggers
from ..system.launcher_env import Job

NEAR_END = "time limit"
# Those of ``sbatch --signal``. After SIGTERM the queue itself decides whether to requeue the job.
_REQUEUED_AT = ("SIGUSR1", "SIGUSR2")
_ANSWER_SECONDS = 30.0


class TimeLimit:
    """Raises a signal ``margin`` before a job ends; at half of the time left if that is less than twice the margin."""

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

    def report_to(self, triggers: Triggers, trigger: str) -> None:
        """Start the timer. One rank is enough, as the signal reaches all ranks."""
        if self._end is None:
            return
        left = max(0.0, self._end - time.time())
        self._timer = threading.Timer(max(left - self._margin, left / 2), triggers.post, (trigger, NEAR_END))
        self._timer.daemon = True
        self._timer.start()


def requeue(job: Job, received: str) -> str:
    """Put a job back into its queue after a signal that asks for it, unless its job file does so.

    Args:
        received: the name of the signal, or ``NEAR_END``.

    Returns:
        A sentence that reports success, the error, or how to have the job requeued at its time limit; else an empty
        text.
    """
    if job.requeues:
        return ""
    if received == NEAR_END:
        # SLURM does not say whether a signal was to come, and by default allows each job to be requeued: it is unknown
        # whether the user wants it. Without ``ckpt_path="auto"``, each requeued job would train from the start.
        return (
            f"phalanx did not put job {job.name} back into the queue, since no signal came before its time was nearly "
            "up: give sbatch --signal=SIGUSR1@SECONDS, with more seconds than time_limit_margin."
        )
    if received not in _REQUEUED_AT:
        return ""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job.name], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Job {job.name} was not put back into the queue: {error}."
    if done.returncode:
        return f"Job {job.name} was not put back into the queue: {(done.stderr or done.stdout).strip()}"
    return f"Job {job.name} was put back into the queue."
