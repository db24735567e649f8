"""``Fabric``: world, strategy and precision as verbs, for people who own their loop. The Trainer's loop uses the same."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from .precision import LossScaler, Precision
from .resources import Resources, resolve_resources
from .strategy import Strategy
from .update import Updater
from .world import World


class Fabric:
    """The verbs of training on one rank or many."""

    def __init__(
        self,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
    ) -> None:
        self.resources: Resources = resolve_resources(accelerator, strategy, devices, num_nodes, precision)
        self.strategy: Strategy = self.resources.strategy
        self.precision: Precision = self.resources.precision
        self.scaler = LossScaler() if self.precision.scaled and not self.strategy.traits.owns_loss_scale else None
        self.updater = Updater(self.strategy, self.scaler)
        self._world: World | None = None

    @property
    def world(self) -> World:
        """This process among the ranks; joined when it is first asked for. Collective the first time."""
        if self._world is None:
            self._world = self.resources.connect()
        return self._world

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_global_zero

    def to_device(self, obj: Any) -> Any:
        """Move a tensor, a module or a collection of tensors to this rank's device."""
        if isinstance(obj, torch.nn.Module):
            return obj.to(self.device)
        return apply_to_collection(obj, Tensor, self._move)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    def all_gather(self, data: Any) -> Any:
        """Return tensors of all ranks, stacked in a new first dimension. Collective."""
        return apply_to_collection(data, Tensor, self.world.all_gather)

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.world.barrier()
