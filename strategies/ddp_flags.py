"""The flags of a step in the gradient reduction of ``ddp``, which saves a message in every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..framework.parallel.step_flags import StepFlags
from ..framework.parallel.strategy import StepAdapter, StepFunction


class FlaggedAdapter(StepAdapter):
    """Adds to every loss a parameter that is 0 and stays 0, whose reduced gradient carries the flags of a step.

    Without it, ranks whose steps returned None could not tell "no rank had a loss, so there is no update" from
    "another rank had one whose gradient is zero" unless they exchanged one more message in every step.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.participation = nn.Parameter(torch.zeros((), device=device))

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` and let the parameter feed its loss."""
        output = step(*args, **kwargs)
        if isinstance(output, Tensor):
            return output + self.participation if output.numel() == 1 else output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": output["loss"] + self.participation}
        return output


class GradientFlags(StepFlags):
    """The flags of a step in one gradient: positive where any rank had a loss, NaN where one was not finite."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._has_loss = False
        self._poison: Any = None

    def reset(self) -> None:
        """Drop the gradient, and what made it NaN."""
        self._parameter.grad = None
        if self._poison is not None:
            self._poison.remove()
            self._poison = None

    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Make the flag's gradient NaN in the window's last backward pass, which DDP reduces, for ``nonfinite``."""
        self._has_loss = has_loss
        if nonfinite and self._poison is None:
            self._poison = self._parameter.register_hook(_not_a_number)

    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Return the flags; read the reduced gradient only if needed, since reading waits for the device."""
        gradient = self._parameter.grad
        if gradient is None or (self._has_loss and not checks_losses):
            return self._has_loss, False
        value = gradient.item()
        return self._has_loss or value > 0, math.isnan(value)


def _not_a_number(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, math.nan)
