"""``GradientAccumulationScheduler``: another number of micro-batches per optimizer step from some epoch on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.api.callback import Callback
from ..framework.core.accumulation import AccumulationSchedule
from ..framework.core.errors import ConfigurationError

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class GradientAccumulationScheduler(Callback):
    """Set how many micro-batches make an optimizer step, by epoch; the same as ``accumulate_grad_batches={...}``.

    Args:
        scheduling: ``{epoch: factor}``, epochs from 0; each factor holds from its epoch on, 1 before the first.

    Raises:
        ConfigurationError: the mapping is empty, an epoch below 0, or a factor below 1.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, dict) or not scheduling:
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give a dict of epochs and factors."
            )
        self.schedule = AccumulationSchedule(scheduling)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the factor of an epoch, from 0."""
        return self.schedule(epoch, 0)

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not module.automatic_optimization and self.schedule.largest > 1:
            raise ConfigurationError(
                "GradientAccumulationScheduler needs automatic optimization; "
                "with automatic_optimization=False accumulate in training_step."
            )
        trainer.set_accumulation(self.schedule)
