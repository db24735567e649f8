"""Strategies with a mistake, which the table of semantics has to find."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies import DDPStrategy


class Forgetful(DDPStrategy):
    """Undoes what was written into weights before an update."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        for parameter, value in self.kept:
            parameter.detach().copy_(value)
        applied = super().step(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.kept = [(each, each.detach().clone()) for each in parameters]
        return applied


class Crashing(DDPStrategy):
    """Ends the process of rank 1 in an update."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.world.rank == 1:
            os._exit(7)
        return super().step(optimizer)


class Waiting(DDPStrategy):
    """Never ends an update."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        time.sleep(600)
        return super().step(optimizer)


class Failing(DDPStrategy):
    """Fails on rank 1 with an error of torch, while rank 0 continues."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.world.rank == 1:
            torch.zeros(2) + torch.zeros(3)
        return super().step(optimizer)


class Silent(DDPStrategy):
    """Refuses without saying what to do."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        raise ConfigurationError("This is not possible here.")


class Refusing(DDPStrategy):
    """Refuses, and says what to do."""

    def setup(self, *arguments: Any) -> Any:
        raise ConfigurationError("This is not possible here: use 'ddp'.")
