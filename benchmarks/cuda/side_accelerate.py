"""Accelerate: a hand-written loop with its methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .job import Job
from .model import build, compile_blocks, optimizer_of

Accelerator: Any = import_module("accelerate").Accelerator


def fit(job: Job) -> None:
    """Run the loop of Accelerate's guide with ``mixed_precision="bf16"``; the batches are given as they are."""
    accelerator = Accelerator(cpu=job.device.type == "cpu", mixed_precision="bf16")
    made = build(job.size, job.device)
    if job.compiled:
        compile_blocks(made)
    model, optimizer = accelerator.prepare(made, optimizer_of(made, job.size))
    for tokens in job.batches:
        job.clock.step()
        loss = model(tokens.to(job.device, non_blocking=True))
        job.clock.keep(loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
