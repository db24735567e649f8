"""The boundaries between the parts of a fit, at which ranks exchange signals and a preempted run ends."""

from __future__ import annotations

from ..resume.preempted_save import leave
from ..run.run import Run


def agree(run: Run) -> None:
    """Exchange signals that callbacks have raised at a boundary outside the batches. Collective."""
    run.triggers.agree()
    run.triggers.handle()
    leave_if_preempted(run)


def leave_if_preempted(run: Run) -> None:
    """Save and end the run if it is preempted, which is the same on all ranks. Collective if it is."""
    if run.preempted_by is not None:
        leave(run, run.context.preemption_directory())
