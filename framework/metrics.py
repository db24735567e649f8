"""torchmetrics without its own communication: the states of all metrics travel in the epoch's one exchange.

A metric that is synchronised asks a function for the tensors of all ranks, state by state. Asked once with a function
that only writes down what it is handed, it tells its states; asked again with one that reads out what was gathered, it
computes the value over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def _parts(metric: Any) -> list[Any]:
    """Return the metric and the metrics inside it."""
    kind = next(
        base for base in type(metric).__mro__ if base.__module__ == "torchmetrics.metric" and base.__name__ == "Metric"
    )
    return [part for part in metric.modules() if isinstance(part, kind)]


def metric_inputs(metric: Any, world_size: int) -> list[list[Tensor]]:
    """Return the state tensors of a metric and of those inside it, on the CPU, in the order they are asked for.

    One process has nobody to tell: each list is empty.
    """
    states: list[list[Tensor]] = []
    for part in _parts(metric) if world_size > 1 else ():
        seen: list[Tensor] = []

        def note(tensor: Tensor, group: Any = None, seen: list[Tensor] = seen) -> list[Tensor]:
            seen.append(tensor.detach().cpu())
            return [tensor]

        part.sync(dist_sync_fn=note, distributed_available=lambda: True)
        part.unsync()
        states.append(seen)
    return states


def gather_states(ranks: Iterable[list[list[Tensor]]]) -> list[list[list[Tensor]]]:
    """Return ``[part][state][rank]`` from ``[rank][part][state]``."""
    return [[list(state) for state in zip(*part, strict=True)] for part in zip(*ranks, strict=True)]


def with_states(metric: Any, states: list[list[list[Tensor]]], distributed: bool) -> Tensor:
    """Compute a metric over the gathered states of all ranks; its own state stays as it is."""
    parts = _parts(metric)
    kept = [(part.dist_sync_fn, part.distributed_available_fn) for part in parts]
    for part, gathered in zip(parts, states if distributed else [[]] * len(parts), strict=True):
        part.dist_sync_fn = _reader(iter(gathered), part.device)
        part.distributed_available_fn = (lambda: True) if distributed else (lambda: False)
    try:
        value = metric.compute()
    finally:
        for part, (function, available) in zip(parts, kept, strict=True):
            part.dist_sync_fn, part.distributed_available_fn = function, available
    return torch.as_tensor(value).detach().float().cpu()


def _reader(gathered: Iterator[list[Tensor]], device: torch.device) -> Any:
    def read(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [part.to(device) for part in next(gathered)]

    return read
