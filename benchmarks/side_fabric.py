"""Lightning's Fabric: a hand-written loop with its methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from .hand_loop import loop
from .task import Batch, Job, build, loss_of, optimizer_of

Fabric: Any = import_module("lightning.fabric").Fabric


def fit(job: Job) -> nn.Module:
    """Run the loop of Fabric's guide; return the trained net."""
    fabric = Fabric(accelerator="cpu", devices=job.ranks, strategy="ddp" if job.ranks > 1 else "auto")
    fabric.launch()
    net = build()
    model, optimizer = fabric.setup(net, optimizer_of(net))

    def step(batch: Batch, updates: bool) -> Tensor:
        if job.accumulate == 1:
            loss = loss_of(model, batch)
            fabric.backward(loss)
        else:
            with fabric.no_backward_sync(model, enabled=not updates):
                loss = loss_of(model, batch)
                fabric.backward(loss / job.accumulate)
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    loop(job, step, fabric.all_reduce, lambda path: fabric.save(path, {"model": model, "optimizer": optimizer}))
    return net
