"""``GradientAccumulationScheduler``: changes the number of micro-batches per optimizer step by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.api.callback import Callback
from ..framework.core.accumulation import AccumulationSchedule
from ..framework.core.errors import ConfigurationError

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class GradientAccumulationScheduler(Callback):
    """Set the number of micro-batches per optimizer step by epoch, like ``accumulate_grad_batches={...}``.

    Args:
        scheduling: ``{epoch: factor}``, epochs counted from 0. A factor applies from its epoch on; before the first
            epoch in the dict, the factor is 1.

    Raises:
        ConfigurationError: The dict is empty, an epoch is below 0, or a factor is below 1.
    """

    collective = True

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, dict) or not scheduling:
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give a dict of epochs and factors."
            )
        self.schedule = AccumulationSchedule(scheduling)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the factor of an epoch, counted from 0."""
        return self.schedule(epoch, 0)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any factor is above 1."""
        return self.schedule.largest > 1

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not module.automatic_optimization and self.schedule.largest > 1:
            raise ConfigurationError(
                "GradientAccumulationScheduler requires automatic optimization; "
                "with automatic_optimization=False, accumulate in training_step."
            )
        trainer.set_accumulation(self.schedule)
