"""``StochasticWeightAveraging`` (SWA): averages the weights of the last epochs, at a constant learning rate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..framework.core.absent_names import lacks
from ..framework.core.errors import ConfigurationError, is_count, unknown
from ..framework.core.foreign_names import MEMBERS
from ..framework.core.optimizer_config import set_learning_rate
from ..framework.state.weight_averages import AverageSettings
from .weight_averaging import Elementwise, WeightAveraging

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


@lacks(MEMBERS["StochasticWeightAveraging"])
class StochasticWeightAveraging(WeightAveraging):
    """Average the weights at the end of each epoch from a given one on, while the learning rate anneals to a constant.

    Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization". See ``WeightAveraging``
    for evaluation, checkpoints and the end of the fit. From the start epoch on, the schedulers of the module are
    paused.

    The running statistics of batch norm layers do not match averaged weights. At the end of each averaged epoch they
    are therefore computed again, by running ``training_step`` on the training data without gradients and with all other
    layers in evaluation mode. These statistics are part of the average. The state of random generators and the position
    in the training data do not change.

    Args:
        swa_lrs: Final learning rate: one value for all parameter groups, or a list with one value per group.
        swa_epoch_start: First epoch, counted from 1; a float is a fraction of ``max_epochs``.
        annealing_epochs: Number of epochs over which the learning rate changes to the final one; 0: immediately.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: ``(average, weights, number of updates) -> new average``. Default: the arithmetic mean.
        device: Device of the average; None: the device of the weights.
        statistics_batches: Number of training batches, over all ranks, for the batch norm statistics. None: all batches
            of an epoch; 0: use the statistics of the module.
        name: Name of the average in checkpoints.
        evaluate: Validate with the average.
        average_at_end: Load the average into the module when ``fit`` ends; otherwise the module has its own weights.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Elementwise | None = None,
        device: torch.device | str | int | None = "cpu",
        *,
        statistics_batches: int | None = None,
        name: str = "swa",
        evaluate: bool = True,
        average_at_end: bool = True,
    ) -> None:
        super().__init__(
            device, use_buffers=False, avg_fn=avg_fn, name=name, evaluate=evaluate, average_at_end=average_at_end
        )
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or any(isinstance(r, bool) or not isinstance(r, (int, float)) or not r > 0 for r in rates):
            raise ConfigurationError(f"swa_lrs={swa_lrs!r} must be a number above 0, or a list of them.")
        whole = isinstance(swa_epoch_start, int) and not isinstance(swa_epoch_start, bool)
        if not (swa_epoch_start >= 1 if whole else isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1):
            raise ConfigurationError(
                f"swa_epoch_start={swa_epoch_start!r} must be an epoch, counted from 1, or a fraction of max_epochs "
                "from 0.0 to 1.0."
            )
        for argument, value in (
            ("annealing_epochs", annealing_epochs),
            ("statistics_batches", statistics_batches or 0),
        ):
            if not is_count(value, 0):
                raise ConfigurationError(f"{argument}={value!r} must be a whole number of at least 0.")
        if annealing_strategy not in ("cos", "linear"):
            raise unknown("annealing_strategy", str(annealing_strategy), ("cos", "linear"))
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.statistics_batches = statistics_batches
        self._start = 0
        self._first_rates: list[float] | None = None

    @property
    def swa_start(self) -> int:
        """First epoch, counted from 0, at whose end the weights are averaged. Valid after the start of a fit."""
        return self._start

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the average at the end of this epoch."""
        return epoch_idx is not None and epoch_idx >= self._start

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"first_rates": self._first_rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_rates = state["first_rates"]

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage != "fit":
            return
        if not module.automatic_optimization:
            raise ConfigurationError(
                "StochasticWeightAveraging sets learning rates, so it requires automatic_optimization = True. For "
                "manual optimization, subclass WeightAveraging and override should_update."
            )
        self._first_rates = None
        start: float = self.swa_epoch_start
        if isinstance(start, float):
            limit = trainer.max_epochs
            if limit is None or limit < 0:
                raise ConfigurationError(
                    f"swa_epoch_start={start} is a fraction of max_epochs, which has no limit: give "
                    "Trainer(max_epochs=...), or an epoch as a whole number."
                )
            start = int(limit * start)
        self._start = max(int(start) - 1, 0)

    def _settings(self) -> AverageSettings:
        return replace(super()._settings(), statistics_batches=self.statistics_batches)

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self.swa_lrs, list) and len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"swa_lrs has {len(self.swa_lrs)} learning rates, but the optimizer has {groups} parameter groups: "
                "give one for each, or a single number."
            )

    def on_train_epoch_start(self, trainer: TrainerView, module: TrainModule) -> None:
        since = trainer.current_epoch - self._start
        if since < 0:
            return
        trainer.pause_lr_schedulers()
        groups = trainer.optimizers[0].param_groups
        if self._first_rates is None:
            self._first_rates = [float(group["lr"]) for group in groups]
        last = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(groups)
        share = self._share(since)
        for group, begin, end in zip(groups, self._first_rates, last, strict=True):
            set_learning_rate(group, begin + (end - begin) * share)

    def _share(self, epochs: int) -> float:
        """Return the completed fraction of the annealing after a number of epochs, from 0 to 1."""
        done = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        return (1 - math.cos(math.pi * done)) / 2 if self.annealing_strategy == "cos" else done
