"""``Accelerator.prepare`` and its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.fabric.fabric import Fabric
from .arguments import updates
from .configuration import DataLoaderConfiguration


class Preparation:
    """Sets up objects with a Fabric.

    Args:
        fabric: the Fabric.
        loaders: the sharing of loaders.
        device_placement: whether modules and batches are moved to the device.
        step_scheduler_with_optimizer: whether a scheduler steps only after an update.
    """

    def __init__(
        self,
        fabric: Fabric,
        loaders: DataLoaderConfiguration,
        device_placement: bool,
        step_scheduler_with_optimizer: bool,
    ) -> None:
        self._fabric = fabric
        self._loaders = loaders
        self._device_placement = device_placement
        self._follows = step_scheduler_with_optimizer

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Set up modules, optimizers, schedulers and loaders. Collective.

        Other objects come back as they are.

        Args:
            objects: in any order. An optimizer that is given with its module is set up together with it.
            device_placement: for each object, whether it is moved to the device.

        Returns:
            One object, or a tuple in the order given.
        """
        moves = device_placement or [self._device_placement] * len(objects)
        ready: dict[int, Any] = {}
        for given, move in zip(objects, moves, strict=True):
            if isinstance(given, nn.Module):
                # An optimizer of two modules is set up with the first, and taken along to the second.
                optimizers = [
                    each
                    for each in objects
                    if isinstance(each, Optimizer) and id(each) not in ready and updates(each, given)
                ]
                found = self._fabric.setup(given, *optimizers, move_to_device=move)
                ready.update(zip(map(id, [given, *optimizers]), found if optimizers else [found], strict=True))
        for given, move in zip(objects, moves, strict=True):
            if id(given) not in ready:
                ready[id(given)] = self._prepare_one(given, move)
        result = tuple(ready[id(given)] for given in objects)
        return result[0] if len(result) == 1 else result

    def _prepare_one(self, given: Any, move: bool) -> Any:
        if isinstance(given, Optimizer):
            return self.prepare_optimizer(given)
        if hasattr(given, "state_dict") and callable(getattr(given, "get_last_lr", None)):
            return self.prepare_scheduler(given)
        if isinstance(given, torch.utils.data.DataLoader):
            return self.prepare_data_loader(given, move)
        return given

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Set up a module whose optimizer is set up later, or that has none. Collective."""
        move = self._device_placement if device_placement is None else device_placement
        return self._fabric.setup_module(model, move_to_device=move)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Set up an optimizer of a module that is set up."""
        return self._fabric.setup_optimizers(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Set up a scheduler. It steps once for each rank after an update, unless batches are split."""
        steps = 1 if self._loaders.split_batches else self._fabric.world_size
        follows = self._follows
        return self._fabric.setup_scheduler(scheduler, follows, steps_per_update=steps if follows else 1)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Set up a loader. Collective.

        Raises:
            ConfigurationError: ``slice_fn_for_dispatch`` is given.
        """
        if slice_fn_for_dispatch is not None:
            raise ConfigurationError(
                "slice_fn_for_dispatch is not known here: with dispatch_batches each rank gets whole batches of the "
                "loader, so give it the batch size of one rank."
            )
        config = self._loaders
        return self._fabric.setup_dataloaders(
            data_loader,
            move_to_device=self._device_placement if device_placement is None else device_placement,
            split_batches=config.split_batches,
            dispatch_batches=bool(config.dispatch_batches),
            even_batches=config.even_batches,
        )
