"""``AverageSettings``: the settings of an average of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Combine = Callable[[list[Tensor], list[Tensor], int], None]
"""Updates averages from live tensors, in place; the number is the count of previous updates."""


@dataclass(frozen=True)
class AverageSettings:
    """The settings of an average."""

    key: str
    """The name in checkpoints."""
    should_update: Callable[..., bool]
    """Whether to update: called with ``step_idx=`` after each applied optimizer step, and with ``epoch_idx=`` after
    each epoch."""
    combine: Combine
    device: torch.device | None = None
    """The device of the average; None for that of the weights."""
    use_buffers: bool = True
    """Whether floating-point buffers are averaged too. If not, the module's own buffers are used."""
    evaluates: bool = True
    """Whether validation during a fit uses the average."""
    stays: bool = True
    """Whether the module has the averaged weights after a fit."""
    statistics_batches: int | None = 0
    """The number of training batches for recomputing batch statistics after an epoch with an update; None: all."""
