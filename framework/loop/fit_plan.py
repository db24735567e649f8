"""``FitPlan``: the limits and intervals of a fit."""

from __future__ import annotations

from dataclasses import dataclass

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
    sanity_batches: int | None = 0
    """Batches of the sanity check of the validation loop before training; None for all."""
