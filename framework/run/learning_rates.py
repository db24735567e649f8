"""``LearningRates``: the part of a run that advances schedulers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..api.train_module import TrainModule
    from ..core.optimizer_config import SchedulerConfig
    from ..core.progress import Progress
    from ..distributed.world import World
    from .run_metrics import RunMetrics


class LearningRates:
    """Advances the schedulers of a run after steps, after the validations of steps, and after epochs."""

    module: TrainModule
    schedulers: list[SchedulerConfig]
    progress: Progress
    metrics: RunMetrics
    world: World
    optimizers: list[Optimizer]
    schedulers_paused = False
    used_rates: list[float]
    """The learning rates of the newest update, where a scheduler has changed them since; else empty."""

    def pause_lr_schedulers(self) -> None:
        """Stop advancing schedulers: a callback sets the learning rates from now on."""
        self.schedulers_paused = True
        self.used_rates.clear()

    def keep_rates(self) -> None:
        """Keep the learning rates that an update has used, before schedulers change them."""
        self.used_rates[:] = rates_of(self.optimizers)

    @property
    def has_step_plateaus(self) -> bool:
        """Whether a scheduler with interval "step" reads a metric, which the validation of the step may log."""
        return self._advances and any(each.interval == "step" and each.needs_metric for each in self.schedulers)

    @property
    def _advances(self) -> bool:
        # Under manual optimization the user advances them.
        return self.module.automatic_optimization and not self.schedulers_paused

    def update_learning_rates(self, interval: str) -> None:
        """Advance the due schedulers of an interval, except those of steps that read a metric."""
        if not self._advances:
            return
        if interval == "step":
            self.keep_rates()
        count = self.progress.global_step if interval == "step" else self.progress.epoch + 1
        for config in self.schedulers:
            later = interval == "step" and config.needs_metric
            if config.interval == interval and count % config.frequency == 0 and not later:
                self._advance(config)

    def update_plateaus(self) -> None:
        """Advance the due schedulers with interval "step" that read a metric, once for each step. Collective then.

        Called when the validation after the step, if there is one, has ended.
        """
        progress = self.progress
        if progress.judged_at == progress.global_step:
            return
        progress.judged_at = progress.global_step
        if self._advances:
            for config in self.schedulers:
                if config.interval == "step" and config.needs_metric and progress.global_step % config.frequency == 0:
                    self._advance(config)

    def _advance(self, config: SchedulerConfig) -> None:
        if not config.needs_metric:
            self.module.lr_scheduler_step(config.scheduler, None)
            return
        known = self.metrics.view("callback")
        mine = known.get(str(config.monitor)) if not config.strict else self.metrics.monitored(
            str(config.monitor), type(config.scheduler).__name__
        )  # fmt: skip
        # A step's value differs between ranks; the learning rates must be the same on all ranks.
        metric = self.world.broadcast_object(mine)
        if metric is not None:
            self.module.lr_scheduler_step(config.scheduler, metric)


def rates_of(optimizers: Iterable[Optimizer]) -> list[float]:
    """Return the learning rate of each optimizer's first group; NaN for one on a device, which would be waited for."""
    rates: list[Any] = [optimizer.param_groups[0].get("lr") for optimizer in optimizers]
    for index, rate in enumerate(rates):
        if rate.__class__ is not float:
            is_readable = isinstance(rate, float) or (isinstance(rate, Tensor) and rate.is_cpu)
            rates[index] = float(rate) if is_readable else math.nan
    return rates
