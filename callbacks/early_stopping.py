"""``EarlyStopping``: stops training when a metric no longer improves."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from ..framework.api.callback import Callback
from ..framework.core.absent_names import lacks
from ..framework.core.errors import ConfigurationError, is_count
from ..framework.core.foreign_names import MEMBERS
from ..framework.metrics.monitor import doubtful_mode, given_mode, is_better, missing_metric
from .monitoring import acts_at_epoch_end

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class EarlyStoppingReason(Enum):
    """The reasons for which ``EarlyStopping`` stops training. The numbers are stored in checkpoints."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


@lacks(MEMBERS["EarlyStopping"])
class EarlyStopping(Callback):
    """Stop training when a metric has not improved for a number of checks.

    The metric is checked after each validation, or at the end of each training epoch if the run validates at most once
    per epoch. Epochs without a validation do not count as checks of its metrics. A stop that is requested on one rank
    stops all ranks at the same step.

    Args:
        monitor: Name of the metric.
        min_delta: Improvements by this value or less do not count. At least 0, in both modes.
        patience: Number of consecutive checks without improvement after which training stops. On resume, this value
            takes precedence over that of the checkpoint, so that a stopped run can continue with more patience.
        verbose: Report each improvement, and each check that is skipped because the metric was not logged.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better; default ``"min"``.
        strict: Raise an error if the metric was not logged; otherwise skip the check.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop when the metric is better than this value.
        divergence_threshold: Stop when the metric is worse than this value.
        check_on_train_epoch_end: Check at the end of training epochs (True) or after validations (False). Default: at
            the end of training epochs if the run validates at most once per epoch.
        log_rank_zero_only: Accepted for compatibility with Lightning; messages are always printed by rank 0 only.

    Raises:
        ConfigurationError: ``monitor`` is not a name, ``mode`` is unknown, or ``min_delta`` or ``patience`` is
            negative.
        MetricError: During the fit: the metric was not logged, and ``strict`` is True.
    """

    monitors = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str | None = None,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self.mode = given_mode("EarlyStopping", mode)
        self._doubt = doubtful_mode("EarlyStopping", monitor, mode)
        if not isinstance(monitor, str) or not monitor:
            raise ConfigurationError(f"EarlyStopping(monitor={monitor!r}): give the name of a logged metric.")
        if not min_delta >= 0:
            raise ConfigurationError(f"EarlyStopping(min_delta={min_delta!r}): give 0 or more, for any mode.")
        if not is_count(patience, 0):
            raise ConfigurationError(f"EarlyStopping(patience={patience!r}): give a whole number of checks, 0 or more.")
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self.stopping_reason_message: str | None
        self._reset()

    @property
    def best_score(self) -> torch.Tensor:
        """Best value so far, as a 0-d float64 tensor; infinity (``-inf`` for ``"max"``) before the first check."""
        return torch.tensor(self._best, dtype=torch.float64)

    @property
    def state_key(self) -> str:
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    @property
    def needed_metrics(self) -> tuple[str, ...]:
        return (self.monitor,)

    @property
    def ranked_metric(self) -> tuple[str, str, float | None]:
        return self.monitor, self.mode, self._best if math.isfinite(self._best) else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def _reset(self) -> None:
        """Reset the state of an earlier run."""
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message = None
        self._best = math.inf if self.mode == "min" else -math.inf

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count = state["wait_count"]
        self.stopped_epoch = state["stopped_epoch"]
        self._best = float(state["best_score"])
        self.stopping_reason = EarlyStoppingReason(state["stopping_reason"])
        self.stopping_reason_message = state["stopping_reason_message"]

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if self._doubt is not None:
            trainer.note(self._doubt)

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            # A resumed fit loads its state from the checkpoint.
            self._reset()

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        # A resumed run whose patience was exhausted stops at once. It would otherwise train until the next check.
        if self.wait_count and self.wait_count >= self.patience:
            trainer.request_stop(self.stopping_reason_message or self._out_of_patience())

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        # An epoch that a stop has cut short has no validation, so the metric would be that of an earlier check.
        if trainer.progress.epoch_ended and acts_at_epoch_end(trainer, self.check_on_train_epoch_end):
            self._check(trainer)

    def on_validation_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if not acts_at_epoch_end(trainer, self.check_on_train_epoch_end):
            self._check(trainer)

    def _check(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            if trainer.val_enabled and trainer.progress.validated_at < 0:
                # The first validation may log it.
                return
            error = missing_metric("EarlyStopping", self.monitor, metrics)
            if self.strict:
                raise error
            if self.verbose:
                trainer.note(f"{error} This check is skipped.")
            return
        if self.monitor in trainer.outdated_metrics:
            # The value was judged when it was measured.
            return
        before = self._best
        reason, message = self._evaluate(float(metrics[self.monitor]))
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason, self.stopping_reason_message = reason, message
            trainer.request_stop(message)
        elif self.verbose and self._best != before:
            by = f" by {abs(before - self._best):.4g}" if math.isfinite(before) else ""
            trainer.note(f"{self.monitor} improved{by} to {self._best:.6g}.")

    def _evaluate(self, value: float) -> tuple[EarlyStoppingReason, str]:
        """Update the state with a value of the metric.

        Returns:
            The reason for stopping and its message; ``NOT_STOPPED`` and an empty message if training continues.
        """
        name, opposite = self.monitor, "max" if self.mode == "min" else "min"
        if self.check_finite and not math.isfinite(value):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{name} is {value}; its best value was {self._best:.6g}."
        needed = self._best - self.min_delta if self.mode == "min" else self._best + self.min_delta
        improved = is_better(value, needed, self.mode)
        if improved:
            self._best = value
        self.wait_count = 0 if improved else self.wait_count + 1
        if self.stopping_threshold is not None and is_better(value, self.stopping_threshold, self.mode):
            message = f"{name} = {value:.6g} is better than stopping_threshold={self.stopping_threshold}."
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        if self.divergence_threshold is not None and is_better(value, self.divergence_threshold, opposite):
            message = f"{name} = {value:.6g} is worse than divergence_threshold={self.divergence_threshold}."
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        if not improved and self.wait_count >= self.patience:
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, self._out_of_patience()
        return EarlyStoppingReason.NOT_STOPPED, ""

    def _out_of_patience(self) -> str:
        """Return the message of a stop after ``patience`` checks without improvement."""
        return f"{self.monitor} did not improve in the last {self.wait_count} checks; best value {self._best:.6g}."
