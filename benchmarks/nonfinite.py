"""What looking for numbers that are not finite takes of a step of the small GPT: timed where it happens.

The difference between two fits, or between neighbouring steps, is drowned by a busy machine: a step varies by more
than a thousand times this.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from phalanx import Trainer, TrainModule
from phalanx.strategies import SingleDeviceStrategy

from .gpt import GPT, batches, next_token_loss
from .table import show


class Timed(SingleDeviceStrategy):
    """Notes how long each look at the gradients takes."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[float] = []

    def gradients_are_finite(self, parameters: Any) -> bool:
        """Look, by the clock."""
        began = time.perf_counter()
        finite = super().gradients_are_finite(parameters)
        self.looks.append((time.perf_counter() - began) * 1e3)
        return finite


class Task(TrainModule):
    """The small GPT; notes when each of its steps begins."""

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


def price(steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and of its look at the gradients."""
    module, strategy = Task(), Timed()
    Trainer(max_epochs=1, barebones=True, accelerator="cpu", strategy=strategy).fit(module, batches(steps))
    lengths = [(end - begin) * 1e3 for begin, end in zip(module.began, module.began[1:], strict=False)]
    return statistics.median(lengths), statistics.median(strategy.looks)


def nonfinite(rounds: int, quick: bool) -> None:
    """Print the price in one process, where nothing hides it."""
    found = [price(20 if quick else 100) for _ in range(rounds)]
    step, look = statistics.median(step for step, _ in found), statistics.median(look for _, look in found)
    shares = sorted(look / step for step, look in found)
    rows = [[step, f"{look:.3f}", f"{look / step:.2%}", f"{shares[0]:.2%} to {shares[-1]:.2%}"]]
    head = ["a step, ms", "looking, ms", "share", "of the rounds"]
    show("Looking for gradients that are not finite, a GPT of 0.9 M parameters, one process", head, rows)
