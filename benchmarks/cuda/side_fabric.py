"""phalanx's Fabric: a hand-written loop."""

from __future__ import annotations

from phalanx import Fabric

from .job import Job
from .model import build, optimizer_of


def fit(job: Job) -> None:
    """Run the loop with ``precision="bf16-mixed"``."""
    fabric = Fabric(
        accelerator=job.device.type,
        devices=1,
        strategy=job.strategy,
        precision="bf16-mixed",
        compile="blocks" if job.compiled else False,
    )
    fabric.launch()
    made = build(job.size, job.device)
    model, optimizer = fabric.setup(made, optimizer_of(made, job.size))
    for tokens in job.batches:
        job.clock.step()
        loss = model(tokens.to(job.device, non_blocking=True))
        job.clock.keep(loss)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
