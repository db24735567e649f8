"""``Trainer.find_lr``: the learning rate range test.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks".

A copy of the module is trained while the learning rate grows after each optimizer step. A rate that is suggested lies
where the loss falls fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api.callback import Callback
from ..core.errors import ConfigurationError, is_count, unknown
from ..core.optimizer_config import set_learning_rate
from .trial_fit import trial_fit

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..api.train_module import TrainModule
    from .session import Session, StageRequest

MODES = ("exponential", "linear")
_SMOOTHING = 0.98


@dataclass(frozen=True)
class LearningRateTest:
    """The learning rates that a range test tries; see ``Trainer.find_lr``."""

    min_lr: float = 1e-8
    max_lr: float = 1.0
    num_training: int = 100
    mode: str = "exponential"
    early_stop_threshold: float | None = 4.0

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        if self.mode not in MODES:
            raise unknown("mode", str(self.mode), MODES)
        if not is_count(self.num_training, 2):
            raise ConfigurationError(f"num_training={self.num_training!r} must be a whole number of at least 2.")
        are_numbers = isinstance(self.min_lr, Real) and isinstance(self.max_lr, Real)
        if not are_numbers or not 0 < self.min_lr < self.max_lr < math.inf:
            raise ConfigurationError(
                f"min_lr={self.min_lr!r} and max_lr={self.max_lr!r} must be finite numbers above 0, and the first "
                "below the second."
            )
        threshold = self.early_stop_threshold
        if threshold is not None and not (isinstance(threshold, Real) and threshold > 1):
            raise ConfigurationError(f"early_stop_threshold={threshold!r} must be a number above 1, or None.")

    def rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0."""
        share = step / (self.num_training - 1)
        if self.mode == "linear":
            return self.min_lr + (self.max_lr - self.min_lr) * share
        return float(self.min_lr * (self.max_lr / self.min_lr) ** share)


@dataclass(frozen=True)
class LearningRates:
    """The result of a range test, the same on every rank.

    ``results`` has two lists of one value for each optimizer step: ``"lr"``, and under ``"loss"`` the smoothed loss.
    """

    results: dict[str, list[float]]

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls fastest; None if fewer than two finite losses remain.

        Args:
            skip_begin: steps at the start that are left out.
            skip_end: steps at the end that are left out.
        """
        pairs = [*zip(self.results["lr"], self.results["loss"], strict=True)][skip_begin:]
        finite = [pair for pair in pairs[: len(pairs) - skip_end] if math.isfinite(pair[1])]
        if len(finite) < 2:
            return None
        (slopes,) = torch.gradient(torch.tensor([loss for _, loss in finite], dtype=torch.float64))
        return finite[int(slopes.argmin())][0]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return matplotlib's figure of the losses over the learning rates, on a logarithmic axis.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: the axes to draw on; None creates them.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ConfigurationError("plot() draws with matplotlib: install it, or read results.") from None
        figure, axes = pyplot.subplots() if ax is None else (ax.figure, ax)
        axes.plot(self.results["lr"], self.results["loss"])
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        rate = self.suggestion() if suggest else None
        if rate is not None:
            axes.plot(rate, self.results["loss"][self.results["lr"].index(rate)], "o", color="red")
        if show:
            pyplot.show()
        return figure


class RangeTest(Callback):
    """Sets the learning rate of each optimizer step and records the loss over all ranks."""

    def __init__(self, test: LearningRateTest) -> None:
        self.test = test
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._sum: Tensor | float = 0.0
        self._mean, self._best, self._steps_reached = 0.0, math.inf, 0

    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        """Set the first learning rate; schedulers change none of them."""
        trainer.pause_lr_schedulers()
        self._set_rate(trainer)

    def on_before_zero_grad(self, trainer: Any, module: TrainModule, optimizer: Optimizer) -> None:
        """Begin a window of micro-batches."""
        self._sum = 0.0

    def on_before_backward(self, trainer: Any, module: TrainModule, loss: Tensor) -> None:
        """Add a loss, which is multiplied by its weight: the sums of all ranks have the weighted mean as their mean."""
        self._sum = self._sum + loss.detach().double()

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss of a step that has ended. Collective then."""
        if trainer.progress.steps_reached == self._steps_reached:
            return
        self._steps_reached = trainer.progress.steps_reached
        scale = 1.0 if trainer.scaler is None else trainer.scaler.scale
        total = torch.as_tensor(self._sum, dtype=torch.float64, device=trainer.world.device) / scale
        loss = float(trainer.world.all_reduce(total, "mean"))
        self._record(trainer, loss)

    def _record(self, trainer: Any, loss: float) -> None:
        done = len(self.results["lr"])
        self.results["lr"].append(self.test.rate(done))
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        smoothed = self._mean / (1 - _SMOOTHING ** (done + 1))
        self.results["loss"].append(smoothed)
        threshold = self.test.early_stop_threshold
        diverges = threshold is not None and done > 0 and smoothed > threshold * self._best
        self._best = min(self._best, smoothed)
        if not math.isfinite(smoothed) or diverges:
            trainer.should_stop = True
        elif done + 1 < self.test.num_training:
            self._set_rate(trainer)

    def _set_rate(self, trainer: Any) -> None:
        rate = self.test.rate(len(self.results["lr"]))
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                set_learning_rate(group, rate)


def run_range_test(session: Session, request: StageRequest, test: LearningRateTest) -> LearningRates:
    """Train a copy of a module in a Trainer of its own, which writes nothing; return the losses. Collective."""
    recorder = RangeTest(test)
    trial_fit(session, request, recorder, max_steps=test.num_training)
    return LearningRates(recorder.results)
