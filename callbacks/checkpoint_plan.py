"""The schedule of ``ModelCheckpoint``, and its plan for one save, decided by rank 0 and broadcast to all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from ..framework.core.errors import ConfigurationError, is_count


class SaveSchedule:
    """A schedule with one rule; every epoch if no rule is given.

    Raises:
        ConfigurationError: a number is negative, or more than one rule is given.
    """

    def __init__(
        self, every_n_train_steps: int | None, every_n_epochs: int | None, train_time_interval: timedelta | None
    ) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None and not is_count(value, 0):
                raise ConfigurationError(f"ModelCheckpoint({name}={value!r}): give a whole number, 0 for never.")
        if train_time_interval is not None and not isinstance(train_time_interval, timedelta):
            raise ConfigurationError(f"ModelCheckpoint(train_time_interval={train_time_interval!r}): give a timedelta.")
        if bool(every_n_train_steps) + bool(every_n_epochs) + (train_time_interval is not None) > 1:
            raise ConfigurationError(
                "ModelCheckpoint: every_n_train_steps, every_n_epochs and train_time_interval exclude one another; "
                "give one of them, or use several ModelCheckpoints."
            )
        unruled = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self.steps = every_n_train_steps or 0
        self.epochs = 1 if unruled else every_n_epochs or 0
        self.interval = train_time_interval
        self.restart_clock()

    @property
    def within_epochs(self) -> bool:
        """Whether a save may be due after any step."""
        return bool(self.steps) or self.interval is not None

    @property
    def saves(self) -> bool:
        """Whether a save may be due at all: no interval is 0 for never."""
        return bool(self.steps or self.epochs) or self.interval is not None

    def step_is_due(self, step: int) -> bool:
        """Whether to save after ``step`` optimizer steps."""
        return bool(self.steps) and step % self.steps == 0

    def epoch_is_due(self, epoch: int) -> bool:
        """Whether to save in an epoch, counted from 0."""
        return bool(self.epochs) and (epoch + 1) % self.epochs == 0

    def time_is_up(self) -> bool:
        """Whether the interval has passed since the clock was started."""
        return self.interval is not None and time.monotonic() - self._since >= self.interval.total_seconds()

    def restart_clock(self) -> None:
        """Begin an interval now."""
        self._since = time.monotonic()


@dataclass(frozen=True)
class SavePlan:
    """The plan of one save; the same on every rank."""

    last: str = ""
    """The path of ``last.ckpt``; empty without ``save_last``."""
    path: str = ""
    """The path of a checkpoint that one of the rules retains; empty if no rule does."""
    score: float | None = None
    """The value of the metric that ranks the checkpoint; None without a metric."""
    counts: bool = False
    """Whether a due checkpoint is saved now, with all the metrics that it needs."""
    missing: str | None = None
    """A sentence that names the metric that is not known yet; files that need it are saved later."""
    waits: bool = False
    """Whether that metric has a value of earlier weights: the next validation gives the one of these."""

    def converted(self, convert: Callable[[str], str]) -> SavePlan:
        """Return the plan with other forms of its paths."""
        return replace(self, last=self.last and convert(self.last), path=self.path and convert(self.path))

    @property
    def targets(self) -> list[str]:
        """The paths to write."""
        return [path for path in (self.path, self.last) if path]
