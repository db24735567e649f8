"""``Timer``: measures the duration of each stage, and stops training after a time limit."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError, unknown
from ..framework.core.intervals import parse_duration

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_STAGES = ("train", "validate", "sanity_check", "test", "predict")


class Timer(Callback):
    """Measure the duration of each stage, and stop training when a time limit is reached.

    The limit includes the training time before a resume. The clock of any rank can end the run; all ranks stop at the
    same step.

    Args:
        duration: Time limit for training: ``"30 min"``, ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its arguments.
            Default: no limit.
        interval: Check the limit after each batch (``"step"``) or each epoch (``"epoch"``).
        verbose: Report the reason for stopping.

    Raises:
        ConfigurationError: The duration has an invalid format, or the interval is unknown.
    """

    # Run after the metrics of the epoch are reduced: the timer logs no metrics itself.
    monitors = True

    def __init__(
        self,
        duration: str | timedelta | dict[str, float] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigurationError(f"Timer(interval={interval!r}): give 'step' or 'epoch'.")
        limit = None if duration is None else parse_duration(duration, "duration", "Timer")
        if limit is not None and limit < timedelta(0):
            raise ConfigurationError(f"Timer(duration={duration!r}): give a time of 0 or more.")
        self._limit_seconds = None if limit is None else limit.total_seconds()
        self._interval = interval
        self._verbose = verbose
        self._starts: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._trained_before = 0.0
        self._deadline = float("inf")

    def wants(self, hook: str) -> bool:
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            return self._limit_seconds is not None and self._interval in hook.replace("batch", "step")
        return super().wants(hook)

    def start_time(self, stage: str = "train") -> float | None:
        """Return the start time of a stage in seconds of the monotonic clock; None if it has not started.

        Stages: ``"train"``, ``"validate"``, ``"sanity_check"``, ``"test"``, ``"predict"``.
        """
        return self._starts.get(_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the end time of a stage in seconds of the monotonic clock; None if it has not ended."""
        return self._ends.get(_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the duration of a stage in seconds, including the time before a resume."""
        before = self._trained_before if _stage(stage) == "train" else 0.0
        start = self._starts.get(_stage(stage))
        if start is None:
            return before
        return before + self._ends.get(_stage(stage), time.monotonic()) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining time in seconds; None if there is no time limit."""
        return None if self._limit_seconds is None else self._limit_seconds - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained_before = float(state["time_elapsed"]["train"])
        self._starts.pop("train", None)
        self._ends.pop("train", None)

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage == "fit" and "train" in self._ends:
            # Another fit has ended; a resumed one loads the time of its earlier parts from the checkpoint.
            self._trained_before = 0.0

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("train")
        if self._limit_seconds is not None:
            self._deadline = self._starts["train"] + self._limit_seconds - self._trained_before
            # A resumed run may have reached the limit already; check now, regardless of the interval.
            self._check(trainer)

    def on_train_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._ends["train"] = time.monotonic()

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._deadline:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._check(trainer)

    def on_validation_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("sanity_check" if trainer.sanity_checking else "validate")

    def on_validation_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._ends["sanity_check" if trainer.sanity_checking else "validate"] = time.monotonic()

    def on_test_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("test")

    def on_test_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._ends["test"] = time.monotonic()

    def on_predict_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._ends["predict"] = time.monotonic()

    def _begin(self, stage: str) -> None:
        self._starts[stage] = time.monotonic()
        self._ends.pop(stage, None)

    def _check(self, trainer: TrainerView) -> None:
        if time.monotonic() < self._deadline:
            return
        # Request the stop only once: the run may have to continue until min_steps or min_epochs.
        self._deadline = float("inf")
        if self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            trainer.request_stop(f"the time limit is reached: the training has taken {elapsed}.")
        else:
            trainer.should_stop = True


def _stage(stage: str) -> str:
    if stage not in _STAGES:
        raise unknown("Timer: stage", stage, _STAGES)
    return stage
