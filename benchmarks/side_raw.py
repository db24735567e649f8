"""The plain torch loop, with the usual features written by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .task import LOG_EVERY, Batches, Job, build, loss_of, optimizer_of


def fit(job: Job) -> nn.Module:
    """Run the loop; return the trained net. On several ranks it is DDP, reducing once for each accumulation window."""
    if job.ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    net = build()
    model = DistributedDataParallel(net) if job.ranks > 1 else net
    optimizer = optimizer_of(net)
    data = Batches(job.steps)
    hooks = [_nothing for _ in range(job.callbacks)] if job.overriding else []
    kept: dict[str, list[Tensor]] = {f"value_{index}": [] for index in range(job.values)}
    for _ in range(job.epochs):
        sums = [torch.zeros(()) for _ in range(job.epoch_values)]
        for index, batch in enumerate(data):
            last = (index + 1) % job.accumulate == 0
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            loss = loss_of(model, batch)
            (loss / job.accumulate if job.accumulate > 1 else loss).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            for values in kept.values():
                values.append(loss.detach())
            for hook in hooks:
                hook()
            if kept and (index + 1) % LOG_EVERY == 0:
                for values in kept.values():
                    values.clear()
            sums = [total + loss.detach() for total in sums]
        if sums:
            _means(sums, job)
    return net


def _means(sums: list[Tensor], job: Job) -> list[float]:
    stacked = torch.stack(sums)
    if job.ranks > 1:
        dist.all_reduce(stacked)
    read: list[float] = (stacked / (job.steps * job.ranks)).tolist()
    return read


def _nothing() -> None:
    pass
