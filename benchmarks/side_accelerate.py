"""Accelerate: a hand-written loop with its methods; missing features are written by hand."""

from __future__ import annotations

import csv
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .task import LOG_EVERY, Batch, Batches, Job, build, loss_of, optimizer_of

Accelerator: Any = import_module("accelerate").Accelerator
tqdm: Any = import_module("tqdm").tqdm


def fit(job: Job) -> nn.Module:
    """Run the loop of Accelerate's guide; return the trained net."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    net = build()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    hooks = [_nothing for _ in range(job.callbacks)] if job.overriding else []
    for _ in range(job.epochs):
        data = Batches(job.steps)
        sums: list[Any] = [0.0] * job.epoch_values
        kept: dict[str, Tensor] = {}
        rows: list[dict[str, float]] = []
        for index, batch in enumerate(tqdm(data) if job.everyday else data):
            loss = _step(accelerator, model, optimizer, batch)
            for value in range(job.values):
                kept[f"value_{value}"] = loss.detach()
            if job.everyday:
                kept["loss"] = loss.detach()
            if kept and (index + 1) % LOG_EVERY == 0:
                rows.append(dict(zip(kept, torch.stack(list(kept.values())).tolist(), strict=True)))
            for hook in hooks:
                hook()
            sums = [total + loss.detach() for total in sums]
        for total in sums:
            accelerator.reduce(total / job.steps, reduction="mean").item()
        if job.everyday:
            _write(job, rows)
            accelerator.save_state(str(job.directory / "kept"))
    return net


def _step(accelerator: Any, model: Any, optimizer: Any, batch: Batch) -> Tensor:
    with accelerator.accumulate(model):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def _write(job: Job, rows: list[dict[str, float]]) -> None:
    with (job.directory / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["loss"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _nothing() -> None:
    pass
