"""The loop that users of Accelerate and of Lightning's Fabric write, with the features that these lack."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .task import LOG_EVERY, Batch, Batches, Job

tqdm: Any = import_module("tqdm").tqdm


def loop(
    job: Job, step: Callable[[Batch, bool], Tensor], mean: Callable[[Any], Tensor], save: Callable[[str], None]
) -> None:
    """Run a job.

    Args:
        job: the fit.
        step: runs a micro-batch, given whether the update follows it; returns the loss.
        mean: returns the mean of a tensor over the ranks.
        save: saves the state to a path.
    """
    hooks = [_nothing for _ in range(job.callbacks)] if job.overriding else []
    for _ in range(job.epochs):
        data = Batches(job.steps)
        sums: list[Any] = [0.0] * job.epoch_values
        kept: dict[str, Tensor] = {}
        rows: list[dict[str, float]] = []
        for index, batch in enumerate(tqdm(data) if job.everyday else data):
            loss = step(batch, (index + 1) % job.accumulate == 0)
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
            mean(total / job.steps).item()
        if job.everyday:
            with (job.directory / "metrics.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=["loss"], extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            save(str(job.directory / "kept"))


def _nothing() -> None:
    pass
