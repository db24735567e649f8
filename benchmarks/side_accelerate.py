"""Accelerate: a hand-written loop with its methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from .hand_loop import loop
from .task import Batch, Job, build, loss_of, optimizer_of

Accelerator: Any = import_module("accelerate").Accelerator


def fit(job: Job) -> nn.Module:
    """Run the loop of Accelerate's guide; return the trained net."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    net = build()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))

    def step(batch: Batch, updates: bool) -> Tensor:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    loop(job, step, lambda value: accelerator.reduce(value, reduction="mean"), accelerator.save_state)
    return net
