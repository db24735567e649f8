"""``FitPlan``: the limits and intervals of a fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.accumulation import AccumulationSchedule
from ..core.intervals import COUNTED, Interval

if TYPE_CHECKING:
    from .evaluation_loop import EvaluationPlan


@dataclass
class FitPlan:
    """Limits and intervals of a fit: its end, logging and validation. Batches are micro-batches of each rank."""

    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    log_every_n_steps: int
    validation: EvaluationPlan | None = None
    check_val_every_n_epoch: int | None = 1
    validate_every_batches: int | None = None
    validate_at_epoch_end: bool = True
    validate_every_seconds: float | None = None
    validate_every: Interval | None = None
    """Steps, tokens or samples between two validations, counted over epochs."""
    max_units: Interval | None = None
    """The tokens or samples after which the fit ends; None without a limit."""
    sanity_batches: int | None = 0
    """Batches of the sanity check of the validation loop before training; None for all."""

    @property
    def epoch_limit(self) -> int | float:
        """The number of epochs after which the fit ends; infinite without a limit."""
        return math.inf if self.max_epochs is None or self.max_epochs < 0 else self.max_epochs

    @property
    def step_limit(self) -> int | float:
        """The number of optimizer steps after which the fit ends; infinite without a limit."""
        return math.inf if self.max_steps < 0 else self.max_steps

    @property
    def counted(self) -> bool:
        """Whether the end or the validations depend on the trained tokens or samples."""
        every = self.validate_every
        return self.max_units is not None or (every is not None and every.unit in COUNTED)


def estimate_steps(
    epoch_limit: int | float, step_limit: int | float, batches: int | None, schedule: AccumulationSchedule
) -> int | float:
    """Return the number of optimizer steps of an entire fit; infinite if unknown.

    Args:
        epoch_limit: the number of epochs.
        step_limit: the largest number of optimizer steps.
        batches: micro-batches of each rank in an epoch; None if unknown.
        schedule: the number of micro-batches in an optimizer step.
    """
    if batches is None or epoch_limit == math.inf:
        return step_limit
    steps = 0
    for epoch in range(int(epoch_limit)):
        steps += schedule.windows(batches, epoch, steps)
        if steps >= step_limit:
            return step_limit
    return steps
