"""Optimizers and learning rate schedulers of a configuration: types of their arguments, and their creation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError
from ..parallel.blocks import replace_method

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""The type of a module's argument that creates an optimizer from parameters."""
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
"""The type of a module's argument that creates a scheduler from an optimizer."""


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler of this name, with the metric that it monitors, which a configuration has no other place for.

    Args:
        optimizer: the optimizer.
        monitor: the name of a logged metric.
        arguments: further arguments of torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *arguments: Any, **options: Any) -> None:
        super().__init__(optimizer, *arguments, **options)
        self.monitor = monitor


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Create an object of a class that a configuration names.

    Args:
        args: the first positional argument, or a tuple of several.
        init: ``class_path`` and, if there are any, ``init_args``.
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **(init.get("init_args") or {}))


def configured_optimizers(module: TrainModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
    """Return an optimizer and a scheduler as ``configure_optimizers`` returns them.

    Raises:
        ConfigurationError: the scheduler needs a metric that the configuration does not name.
    """
    if lr_scheduler is None:
        return optimizer
    if not isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return [optimizer], [lr_scheduler]
    if not isinstance(lr_scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "lr_scheduler: torch's ReduceLROnPlateau names no metric; use class_path: "
            "phalanx.configuration.ReduceLROnPlateau with init_args: {monitor: val_loss}."
        )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}}


def use_optimizers(
    module: TrainModule,
    configure: Callable[..., Any],
    optimizer: dict[str, Any],
    lr_scheduler: dict[str, Any] | None,
) -> None:
    """Make ``configure_optimizers`` of a module create the optimizer and the scheduler of a configuration.

    They are created when the method is called, so that parameters of ``configure_model`` are among them.

    Args:
        module: the module.
        configure: a function of the module, ``optimizer`` and ``lr_scheduler`` that returns the method's result.
        optimizer: the optimizer's class and arguments.
        lr_scheduler: those of the scheduler, or None.
    """

    def configure_optimizers(self: TrainModule) -> Any:
        created = instantiate_class(self.parameters(), optimizer)
        scheduler = None if lr_scheduler is None else instantiate_class(created, lr_scheduler)
        return configure(self, optimizer=created, lr_scheduler=scheduler)

    # A method, so that a copy of the module has one of its own.
    replace_method(module, "configure_optimizers", MethodType(configure_optimizers, module))
