"""Transfer of batches to the device, resolved once per run; no call at all if there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.precision import Precision
from ..fabric.collectives import to_device

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(
    device: torch.device, precision: Precision, module: TrainModule, datamodule: DataModule | None
) -> Callable[[Any, int], Any] | None:
    """Return a function from ``(batch, dataloader_idx)`` to the transferred batch; None if batches are unchanged.

    A hook of the DataModule has precedence over the module's hook of the same name.
    """
    before, move, after = (_overridden(name, module, datamodule) for name in _HOOKS)
    converts = precision.converts_batch
    if move is None and device.type == "cpu":
        if before is None and after is None and not converts:
            return None
    elif move is None:
        move = _move

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, device, dataloader_idx)
        if converts:
            batch = precision.convert_batch(batch)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer


def _move(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
    return to_device(batch, device)


def _overridden(name: str, module: TrainModule, datamodule: DataModule | None) -> Callable[..., Any] | None:
    for owner, base in ((datamodule, DataModule), (module, TrainModule)):
        if owner is not None and getattr(type(owner), name, None) is not getattr(base, name):
            hook: Callable[..., Any] = getattr(owner, name)
            return hook
    return None
