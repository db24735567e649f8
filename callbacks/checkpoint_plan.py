"""The schedule of ``ModelCheckpoint``, and its plan for one save, decided by rank 0 and broadcast to all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

from ..framework.core.errors import ConfigurationError, is_count
from ..framework.core.intervals import COUNTED, Interval
from ..framework.core.wording import counted
from ..framework.report.values import span_text

AUTO = "auto"
# 16,384 GPUs had 419 unexpected interruptions in 54 days: "The Llama 3 Herd of Models" (2024), section 3.3.4.
_RANK_HOURS_PER_FAILURE = 50_000
_FIRST_SECONDS, _LEAST_SECONDS, _MOST_SECONDS = 300.0, 30.0, 3600.0
# A tenth of the time at most is spent on saves.
_LEAST_INTERVAL_IN_SAVES = 10.0


def best_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the seconds between saves after which the least time is lost to saves and failures.

    Young's formula, ``sqrt(2 * save * failure)``: J. W. Young, "A first order approximation to the optimum checkpoint
    interval" (1974). It is at least 30 s and at most an hour, but never less than ten times a save.

    Args:
        save_seconds: how long training waits for one save.
        failure_seconds: the mean time between two failures.
    """
    found = math.sqrt(2.0 * save_seconds * failure_seconds)
    return max(min(found, _MOST_SECONDS), _LEAST_SECONDS, _LEAST_INTERVAL_IN_SAVES * save_seconds)


def _assumed(ranks: int) -> tuple[float, str]:
    """Return the mean seconds between two failures of a run that has not failed, and a text that says so."""
    seconds = _RANK_HOURS_PER_FAILURE * 3600.0 / ranks
    return seconds, f"one failure in {span_text(seconds, 1)} is assumed for {counted(ranks, 'rank')}"


class SaveSchedule:
    """A schedule with one rule; every epoch if no rule is given.

    Args:
        every_n_train_steps: optimizer steps between two saves; 0 for never.
        every_n_epochs: epochs between two saves; 0 for never.
        train_time_interval: the time between two saves.
        every: an interval of any unit, or ``"auto"`` for an interval of time that follows from the seconds of a save
            and the failures of the run.

    Raises:
        ConfigurationError: a number is negative, or more than one rule is given.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        every: str | int | None = None,
    ) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None and not is_count(value, 0):
                raise ConfigurationError(f"ModelCheckpoint({name}={value!r}): give a whole number, 0 for never.")
        if train_time_interval is not None and not isinstance(train_time_interval, timedelta):
            raise ConfigurationError(f"ModelCheckpoint(train_time_interval={train_time_interval!r}): give a timedelta.")
        given = (bool(every_n_train_steps), bool(every_n_epochs), train_time_interval is not None, every is not None)
        if sum(given) > 1:
            raise ConfigurationError(
                "ModelCheckpoint: every_n_train_steps, every_n_epochs, train_time_interval and every exclude "
                "one another; give one of them, or use several ModelCheckpoints."
            )
        self.is_auto = every == AUTO
        self._reported_seconds = math.inf
        self.units: Interval | None = None
        """The tokens or samples between two saves; None for another rule."""
        if self.is_auto:
            train_time_interval = timedelta(seconds=_FIRST_SECONDS)
        elif isinstance(every, str) and not any(map(str.isdigit, every)):
            raise ConfigurationError(
                f"ModelCheckpoint(every={every!r}): give 'auto', or a number and its unit, such as '1000 steps'."
            )
        elif every is not None:
            found = Interval.parse(every, owner="ModelCheckpoint")
            every_n_train_steps, every_n_epochs = found.number_of("steps"), found.number_of("epochs")
            train_time_interval = found.time
            if found.unit in COUNTED:
                self.units = found
        rules = (every_n_train_steps, every_n_epochs, train_time_interval, self.units)
        unruled = all(rule is None for rule in rules)
        self.steps = every_n_train_steps or 0
        self.epochs = 1 if unruled else every_n_epochs or 0
        self.interval = train_time_interval
        self.restart_clock()

    def adapt(self, save_seconds: float, failures: int, seconds: float, ranks: int) -> str | None:
        """Choose the interval of ``"auto"``; return a sentence that says what it is, and why.

        None: it is between half and twice the one that was reported last, as a save takes a little longer or shorter
        each time.

        Args:
            save_seconds: how long training waited for the newest save.
            failures: how often the run has failed.
            seconds: the time in which it did.
            ranks: the number of ranks.
        """
        if failures:
            expected = max(seconds, 1.0) / failures
            why = f"this run has failed {counted(failures, 'time')} in {span_text(seconds)}"
        else:
            expected, why = _assumed(ranks)
        found = best_interval(save_seconds, expected)
        self.interval = timedelta(seconds=found)
        if 0.5 < found / self._reported_seconds < 2.0:
            return None
        self._reported_seconds = found
        every = span_text(found)
        return f"Checkpoints are saved every {every}: a save takes {span_text(save_seconds)}, and {why}."

    def prospect(self, ranks: int) -> str | None:
        """Return a sentence on the saves of ``"auto"`` before any was measured; None for other intervals."""
        if not self.is_auto:
            return None
        expected, why = _assumed(ranks)
        fast, slow = (span_text(best_interval(seconds, expected)) for seconds in (1.0, 30.0))
        return (
            f"the first after {span_text(_FIRST_SECONDS)}. Then {why}: every {fast} if a save takes 1 s, every {slow} "
            "if it takes 30 s."
        )

    @property
    def within_epochs(self) -> bool:
        """Whether a save may be due after any step."""
        return bool(self.steps) or self.interval is not None or self.units is not None

    @property
    def identity(self) -> float | str | None:
        """The rule of time in ``ModelCheckpoint.state_key``: the given seconds, ``"auto"``, or None."""
        if self.is_auto:
            return AUTO
        return None if self.interval is None else self.interval.total_seconds()

    @property
    def saves(self) -> bool:
        """Whether a save may be due at all: False if the interval is 0, for never."""
        return bool(self.steps or self.epochs) or self.interval is not None or self.units is not None

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
    """Whether this is a save of the schedule, which ``keep_every_nth`` counts."""
    missing: str | None = None
    """A sentence that names the metric that is not known yet; files that need it are saved later."""
    waits: bool = False
    """Whether that metric has a value of earlier weights: the next validation gives the one of these."""
    saved_at: float | None = None
    """The time of a save whose score an evaluation aside will give, in seconds since 1970; None for other saves."""
    arrived: dict[str, float] = field(default_factory=dict)
    """The scores of earlier checkpoints that have become known, by path."""

    def converted(self, convert: Callable[[str], str]) -> SavePlan:
        """Return the plan with other forms of its paths."""
        arrived = {convert(path): score for path, score in self.arrived.items()}
        last, path = self.last and convert(self.last), self.path and convert(self.path)
        return replace(self, last=last, path=path, arrived=arrived)

    @property
    def targets(self) -> list[str]:
        """The paths to write."""
        return [path for path in (self.path, self.last) if path]
