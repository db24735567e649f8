"""Closures of optimizers: functions that compute the loss and its gradients inside ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.errors import ConfigurationError
from ..core.split_optimizer import needs_closure


def evaluate_once(optimizer: Optimizer, closure: Callable[[], Any], strategy: str) -> Any:
    """Run a closure before the update, for an optimizer that evaluates the loss once; return its result.

    Args:
        optimizer: the optimizer that was given the closure.
        closure: computes the loss and its gradients.
        strategy: the name of the strategy, for the error.

    Raises:
        ConfigurationError: the optimizer evaluates the loss several times and changes the weights in between.
    """
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the loss several times for an update, and changes full weights in "
            f"between, which strategy={strategy!r} splits over ranks and a loss scale does not allow: use another "
            "optimizer, or strategy='ddp' without fp16."
        )
    with torch.enable_grad():
        return closure()
