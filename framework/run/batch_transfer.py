"""The way of a batch to the device, decided once: nothing at all where nothing has to happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.precision import Precision


class Mover(Protocol):
    """What is asked of a Fabric."""

    precision: Precision

    @property
    def device(self) -> torch.device: ...

    def to_device(self, obj: Any) -> Any: ...


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(
    fabric: Mover, module: TrainModule, datamodule: DataModule | None
) -> Callable[[Any, int], Any] | None:
    """Return the function from ``(batch, dataloader_idx)`` to the batch that a step gets; None for the batch itself.

    A hook of the DataModule goes before the module's own of the same name.
    """
    before, move, after = (_overridden(name, module, datamodule) for name in _HOOKS)
    converts = fabric.precision.converts_batch
    if move is None and fabric.device.type == "cpu":
        if before is None and after is None and not converts:
            return None
    elif move is None:
        move = _to_device(fabric)

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, fabric.device, dataloader_idx)
        if converts:
            batch = fabric.precision.convert_batch(batch)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer


def _to_device(fabric: Mover) -> Callable[[Any, Any, int], Any]:
    return lambda batch, device, dataloader_idx: fabric.to_device(batch)


def _overridden(name: str, module: TrainModule, datamodule: DataModule | None) -> Callable[..., Any] | None:
    for owner, base in ((datamodule, DataModule), (module, TrainModule)):
        if owner is not None and getattr(type(owner), name, None) is not getattr(base, name):
            hook: Callable[..., Any] = getattr(owner, name)
            return hook
    return None
