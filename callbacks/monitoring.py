"""The choice between the ends of epochs and validations for callbacks that monitor a metric."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView


def acts_at_epoch_end(trainer: TrainerView, choice: bool | None) -> bool:
    """Whether a metric is read at the end of training epochs rather than after validations.

    ``choice`` None decides by the schedule of validations.

    A single validation per epoch runs right before the end of the epoch, where training metrics are known too.
    """
    if choice is not None:
        return choice
    interval = trainer.val_check_interval
    once = interval is None or (isinstance(interval, float) and interval == 1.0)
    return not trainer.val_enabled or (once and trainer.check_val_every_n_epoch == 1)
