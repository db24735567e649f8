"""Steps without side effects: logs, metrics, random generators and buffers are unchanged."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor, nn

from ..api.train_module import TrainModule
from ..distributed.seed import capture, restore
from ..metrics.torchmetrics_state import metrics_set_aside
from ..parallel.fresh_batches import fresh as fresh
from ..parallel.sync_batch_norm import is_collective


@contextmanager
def isolated(module: nn.Module, keep_buffers: bool = True) -> Generator[None, None, None]:
    """Run steps without changing logs, metrics and random generators.

    With ``keep_buffers`` buffers keep their values too, except those of layers that compute them over all ranks.
    """
    log = module.log_to(None) if isinstance(module, TrainModule) else None
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
        if isinstance(module, TrainModule):
            module.log_to(log)


def _own_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (part, name, buffer)
        for part in module.modules()
        if not is_collective(part)
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
