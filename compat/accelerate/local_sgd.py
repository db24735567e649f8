"""``LocalSGD``: updates of each rank by itself, with weights averaged now and then."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...framework.core.errors import ConfigurationError

__all__ = ["LocalSGD"]


class LocalSGD:
    """Let ranks train by themselves and average their weights every few updates (Stich 2019, "Local SGD Converges Fast
    and Communicates Little").

    Args:
        accelerator: an ``Accelerator``.
        model: a module that is set up under a strategy that replicates it.
        local_sgd_steps: the number of updates between two averages.
        enabled: False for ordinary data parallelism.

    Raises:
        ConfigurationError: the strategy shards the module, or ``local_sgd_steps`` is less than 1.
    """

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        traits = accelerator.fabric.strategy.traits
        if enabled and (traits.shards_state or traits.reduces_in_backward):
            raise ConfigurationError(
                f"LocalSGD needs ranks with whole models; strategy={accelerator.fabric.strategy.name!r} shards them: "
                "use 'ddp'."
            )
        if local_sgd_steps < 1:
            raise ConfigurationError(f"local_sgd_steps={local_sgd_steps!r} must be a whole number of at least 1.")
        self._accelerator = accelerator
        self._model = model
        self._steps = local_sgd_steps
        self._enabled = enabled and accelerator.num_processes > 1
        self._done = 0
        self._stack = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self._enabled:
            self._stack.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if self._enabled and error[0] is None:
            self._average()

    def step(self) -> None:
        """Count an update, and average the weights if it is time. Collective."""
        self._done += 1
        if self._enabled and self._done % self._steps == 0:
            self._average()

    def _average(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(self._accelerator.reduce(parameter.detach(), reduction="mean"))
