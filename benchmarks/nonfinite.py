"""The cost per step of the small GPT of checking for non-finite gradients.

Every other update of a fit skips the check. The benchmark compares the time from before the check to after the
optimizer's step, since the times of full steps vary by many times the difference. The time of the check is not
meaningful without the step, since it reads the data that the optimizer reads next.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx import Trainer, TrainModule
from phalanx.strategies import GradientOperations, SingleDeviceStrategy

from .gpt import GPT, batches, next_token_loss
from .table import show


class AlternatingChecks(GradientOperations):
    """Checks the gradients of every other update; records the milliseconds of updates."""

    def __init__(self) -> None:
        self.looked: list[float] = []
        self.unseen: list[float] = []
        self._began = 0.0

    def are_finite(self, parameters: Any) -> bool:
        """Check the gradients in every other call."""
        self._began = time.perf_counter()
        return len(self.looked) > len(self.unseen) or super().are_finite(parameters)

    def end_update(self) -> None:
        """Record the time since the last check."""
        taken = self.unseen if len(self.looked) > len(self.unseen) else self.looked
        taken.append((time.perf_counter() - self._began) * 1e3)


class Alternating(SingleDeviceStrategy):
    """Trains on one device with ``AlternatingChecks``."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: AlternatingChecks = AlternatingChecks()

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights."""
        applied = super().step(optimizer)
        self.gradients.end_update()
        return applied


class Task(TrainModule):
    """The small GPT. Records the start time of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()
        self.began: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        self.began.append(time.perf_counter())
        return next_token_loss(self.gpt, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def price(steps: int) -> tuple[float, float, float]:
    """Return the median milliseconds of a step, of an update without the check and of one with it."""
    module, strategy = Task(), Alternating()
    Trainer(max_epochs=1, barebones=True, accelerator="cpu", strategy=strategy).fit(module, batches(steps))
    times = strategy.gradients
    lengths = [(end - begin) * 1e3 for begin, end in zip(module.began, module.began[1:], strict=False)]
    return statistics.median(lengths), statistics.median(times.unseen), statistics.median(times.looked)


def nonfinite(rounds: int, quick: bool) -> None:
    """Print the cost in one process, where it does not overlap with communication."""
    found = [price(40 if quick else 300) for _ in range(rounds)]
    step, unseen, looked = (statistics.median(column) for column in zip(*found, strict=True))
    shares = sorted((looked - unseen) / step for step, unseen, looked in found)
    share = f"{statistics.median(shares):.2%}"
    rows = [[step, f"{unseen:.3f}", f"{looked:.3f}", share, f"{shares[0]:.2%} to {shares[-1]:.2%}"]]
    head = ["a step, ms", "its update, ms", "with the look, ms", "more of a step", "of the rounds"]
    show("Looking for gradients that are not finite, a GPT of 0.9 M parameters, one process", head, rows)
