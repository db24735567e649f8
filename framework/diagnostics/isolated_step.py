"""Steps without side effects: logs, metrics, random generators and buffers are unchanged."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..api.train_module import TrainModule
from ..distributed.seed import capture, restore
from ..metrics.torchmetrics_state import metrics_set_aside
from ..parallel.fresh_batches import fresh as fresh
from ..parallel.sync_batch_norm import is_collective

# Longer containers are data.
_MOST_ITEMS = 10_000
_OF_MODULE = frozenset(vars(nn.Module()))
_MISSING = object()


@contextmanager
def isolated(
    module: nn.Module, keep_buffers: bool = True, keep_attributes: bool = False
) -> Generator[None, None, None]:
    """Run steps without changing logs, metrics and random generators.

    With ``keep_buffers`` buffers keep their values too, except those of layers that compute them over all ranks.
    With ``keep_attributes`` so do numbers, texts and containers in attributes of the module itself, in which a step may
    count.
    """
    log = module.log_to(None) if isinstance(module, TrainModule) else None
    random = capture()
    attributes = _plain_attributes(module) if keep_attributes else {}
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
        _put_back(module, attributes)
        if isinstance(module, TrainModule):
            module.log_to(log)


def _plain_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of the module itself that a step may count in or add to, and copies of containers."""
    found = {}
    for name, value in vars(module).items():
        if name in _OF_MODULE:
            continue
        if value is None or isinstance(value, bool | int | float | complex | str):
            found[name] = value, value
        elif type(value) in (list, dict, set) and len(value) <= _MOST_ITEMS:
            found[name] = value, value.copy()
    return found


def _put_back(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, copied) in attributes.items():
        if value is not copied:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(copied)
        if vars(module).get(name, _MISSING) is not value:
            setattr(module, name, value)


def _own_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (part, name, buffer)
        for part in module.modules()
        if not is_collective(part)
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
