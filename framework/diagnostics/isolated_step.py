"""Steps without side effects: logs, metrics, random generators and buffers are unchanged."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor, nn

from ..api.train_module import TrainModule
from ..distributed.seed import capture, restore
from ..metrics.torchmetrics_state import metrics_set_aside
from ..parallel.sync_batch_norm import is_collective


@contextmanager
def isolated(module: TrainModule, keep_buffers: bool = True) -> Generator[None, None, None]:
    """Run steps without changing logs, metrics and random generators.

    With ``keep_buffers`` buffers keep their values too, except those of layers that compute them over all ranks.
    """
    log = module.log_to(None)
    random = capture()
    buffers = _own_buffers(module) if keep_buffers else []
    for part, name, buffer in buffers:
        part._buffers[name] = buffer.clone()
    try:
        with metrics_set_aside(module):
            yield
    finally:
        # The original objects are put back instead of copying values: tensors that autograd saved are not modified.
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        restore(random)
        module.log_to(log)


def _own_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (part, name, buffer)
        for part in module.modules()
        if not is_collective(part)
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


def fresh(batch: Any) -> Any:
    """Return a batch of new containers with the same tensors, since a step may remove items from a batch."""
    if batch.__class__ is dict:
        return {key: fresh(value) for key, value in batch.items()}
    if batch.__class__ is list:
        return [fresh(value) for value in batch]
    if batch.__class__ is tuple:
        return tuple(fresh(value) for value in batch)
    return copy(batch) if isinstance(batch, Mapping) else batch
