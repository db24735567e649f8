"""``Interval``: how often something happens, or when training ends, in steps, epochs, tokens, samples or time.

Everything that takes an interval reads it here: arguments of ``Trainer``, of callbacks, of ``Fabric`` and of commands.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence, Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol

from .errors import ConfigurationError, closest_or_known, is_count
from .progress import Progress

UNITS = ("steps", "epochs", "tokens", "samples", "seconds")
"""The units of intervals: optimizer steps, epochs, trained tokens or samples of all ranks, and seconds of time."""
WITHIN_EPOCHS = ("steps", "tokens", "samples", "seconds")
"""The units of intervals that may pass within an epoch."""
COUNTED = ("tokens", "samples")
"""The units of which a run counts one, by the module's ``batch_weight``."""

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_WORDS = {
    **{form: (unit, 1) for unit in UNITS[:-1] for form in (unit, unit[:-1])},
    **{form: ("seconds", factor) for form, factor in _SECONDS.items()},
    **dict.fromkeys(("sec", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("m", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("hour", "hours"), ("seconds", 3600)),
    **dict.fromkeys(("day", "days"), ("seconds", 86400)),
    **dict.fromkeys(("w", "week", "weeks"), ("seconds", 604800)),
}
_SHOWN = {**{unit: (unit,) for unit in UNITS[:-1]}, "seconds": tuple(_SECONDS)}
_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_TEXT = re.compile(rf"\s*({_NUMBER})\s*([^\W\d]\w*)\s*")
_CLOCK = re.compile(r"\s*(\d+):(\d+):(\d+):(\d+(?:\.\d+)?)\s*")
_COUNTS: dict[str, Callable[[Progress], float]] = {
    "steps": attrgetter("global_step"),
    "epochs": attrgetter("epochs_done"),
    "tokens": attrgetter("units"),
    "samples": attrgetter("units"),
}


@dataclass(frozen=True)
class Interval:
    """A number of steps, epochs, tokens or samples, or of seconds.

    Example::

        interval = Interval.parse("1e9 tokens")
        interval.number, interval.unit   # 1000000000, "tokens"

    Args:
        number: at least 1; above 0 for seconds.
        unit: one of ``UNITS``.
    """

    number: float
    unit: str

    @classmethod
    def parse(cls, given: Any, name: str = "every", owner: str = "", units: Sequence[str] = UNITS) -> Interval:
        """Return the interval of a text, a number of steps, a ``timedelta`` or a dict of its arguments.

        Args:
            given: ``"1000 steps"``, ``"2 epochs"``, ``"1e9 tokens"``, ``"5e6 samples"``, ``"30 min"`` (``s``, ``min``,
                ``h``, ``d``, ``w``), ``"DD:HH:MM:SS"``; an int counts steps.
            name: the argument, for messages.
            owner: the class that takes it, for messages.
            units: those of ``UNITS`` that the argument takes.

        Raises:
            ConfigurationError: it is not an interval, or its unit is not one of ``units``.
        """
        what = _named(given, name, owner)
        if isinstance(given, Interval):
            found: Interval | None = given
        elif isinstance(given, (timedelta, dict)):
            found = cls(_seconds_of(given, what), "seconds")
        elif isinstance(given, str):
            found = cls._of_text(given, what, units)
        else:
            found = cls(given, "steps") if is_count(given, 1) else None
        if found is None:
            raise ConfigurationError(f"{what}: give a number and its unit, such as {_examples(units)}.")
        if found.unit not in units:
            raise ConfigurationError(f"{what} is in {found.unit}: give it in {_listed(units)}.")
        if found.number <= 0:
            raise ConfigurationError(f"{what} must be longer than zero.")
        return found

    @classmethod
    def _of_text(cls, text: str, what: str, units: Sequence[str]) -> Interval | None:
        if (clock := _CLOCK.fullmatch(text)) is not None:
            days, hours, minutes, seconds = (float(part) for part in clock.groups())
            span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
            return cls(span.total_seconds(), "seconds")
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        word = match[2].lower()
        if word not in _WORDS:
            shown = [form for unit in units for form in _SHOWN[unit]]
            raise ConfigurationError(f"{what}: {match[2]!r} is not a unit.{closest_or_known(match[2], shown)}")
        unit, factor = _WORDS[word]
        number = float(match[1].replace("_", "")) * factor
        if unit == "seconds":
            return cls(number, unit)
        if number < 1 or number != int(number):
            raise ConfigurationError(f"{what}: give a whole number of {unit}, of at least 1.")
        return cls(int(number), unit)

    def __str__(self) -> str:
        if self.unit != "seconds":
            return f"{self.number} {self.unit[:-1] if self.number == 1 else self.unit}"
        form = next((form for form in ("d", "h", "min") if self.number % _SECONDS[form] == 0), "s")
        return f"{self.number / _SECONDS[form]:g} {form}"

    @property
    def time(self) -> timedelta | None:
        """The time of an interval in seconds; None for another unit."""
        return timedelta(seconds=self.number) if self.unit == "seconds" else None

    def number_of(self, unit: str) -> int | None:
        """Return the number of an interval whose unit is ``unit``, such as ``"steps"``; else None."""
        return int(self.number) if self.unit == unit else None

    def count(self, progress: Progress) -> float:
        """Return how many of its units a run has completed. Not for seconds."""
        return _COUNTS[self.unit](progress)

    def check_unit(self, unit: str, what: str) -> None:
        """Refuse tokens in a run that counts samples, and the reverse.

        Args:
            unit: what the run counts, ``"tokens"`` or ``"samples"``.
            what: the argument with the interval, for the message.

        Raises:
            ConfigurationError: the run does not count the unit.
        """
        if self.unit not in COUNTED or self.unit == unit:
            return
        if self.unit == "tokens":
            advice = "define batch_weight in the module, which returns the tokens of a batch, or give samples or steps"
        else:
            advice = "the module's batch_weight counts the tokens of a batch: give tokens or steps"
        raise ConfigurationError(f"{what} is in {self.unit}, but this run counts {unit}: {advice}.")


class Boundaries(Protocol):
    """The attributes of a Trainer that ``Due`` uses."""

    @property
    def progress(self) -> Progress: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def fired_triggers(self) -> AbstractSet[str]: ...
    def raise_trigger(self, name: str, payload: Any = None) -> None: ...


class Due:
    """Whether an interval has passed, asked at the ends of optimizer steps and of epochs.

    A number of steps, epochs, tokens or samples is due at the first of these ends at which the count of the entire run,
    before a resume too, has reached the next multiple. It is the same on every rank. Time is that since the previous
    time it was due: rank 0's clock decides, and all ranks learn of it in the control reduction of the next step.

    Create it in ``on_train_start``, and call ``reached`` on every rank, in ``on_train_batch_end``, and in
    ``on_train_epoch_end`` of a callback with ``monitors = True`` for a number of epochs, whose end is not known before.

    Example::

        class Report(Callback):
            monitors = True
            counted_intervals = (Interval.parse("1e6 samples"),)

            def on_train_start(self, trainer, module):
                self.due = Due(self.counted_intervals[0], trainer, "report")

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if self.due.reached():
                    trainer.print("another million")

    Args:
        interval: the interval.
        trainer: the Trainer, in a fit.
        name: a name that no other ``Due`` of the run has.
    """

    def __init__(self, interval: Interval, trainer: Boundaries, name: str) -> None:
        self._trainer, self._progress = trainer, trainer.progress
        self._number = interval.number
        self._name = f"due: {name}"
        self.reached: Callable[[], bool]
        """Return whether the interval has passed; True once for each time. Call it on every rank."""
        if interval.unit == "seconds":
            self.reached = self._reached_by_clock
            self._since = time.monotonic()
            # In a window of several micro-batches a trigger is seen in each.
            self._step = -1
        else:
            self.reached = self._reached_by_count
            self._count = _COUNTS[interval.unit]
            self._next = self._after(self._count(self._progress))

    def _after(self, count: float) -> float:
        return (count // self._number + 1) * self._number

    def _reached_by_count(self) -> bool:
        count = self._count(self._progress)
        if count < self._next:
            return False
        self._next = self._after(count)
        return True

    def _reached_by_clock(self) -> bool:
        step, trainer = self._progress.steps_reached, self._trainer
        if step == self._step:
            return False
        if self._name in trainer.fired_triggers:
            self._step, self._since = step, time.monotonic()
            return True
        if trainer.is_global_zero and time.monotonic() - self._since >= self._number:
            trainer.raise_trigger(self._name)
        return False


def parse_duration(given: Any, name: str, owner: str = "") -> timedelta:
    """Return the time of ``"30 min"``, ``"DD:HH:MM:SS"``, a ``timedelta`` or a dict of its arguments.

    Raises:
        ConfigurationError: it is none of these.
    """
    what = _named(given, name, owner)
    if isinstance(given, (timedelta, dict)):
        return timedelta(seconds=_seconds_of(given, what))
    found = Interval._of_text(given, what, ("seconds",)) if isinstance(given, str) else None
    if found is None or found.unit != "seconds":
        raise ConfigurationError(
            f"{what} must be a time such as '30 min' or '2 h', a timedelta, a dict such as {{'hours': 2}}, or a string "
            "'DD:HH:MM:SS'."
        )
    return timedelta(seconds=found.number)


def seconds_of(text: str) -> float | None:
    """Return the seconds of a time such as ``"90s"`` or ``"2 h"``; None if the text is none."""
    try:
        found = Interval._of_text(text, text, ("seconds",))
    except ConfigurationError:
        return None
    return found.number if found is not None and found.unit == "seconds" else None


def _named(given: Any, name: str, owner: str) -> str:
    return f"{owner}({name}={given!r})" if owner else f"{name}={given!r}"


def _seconds_of(given: timedelta | dict[str, Any], what: str) -> float:
    if isinstance(given, timedelta):
        return given.total_seconds()
    try:
        return timedelta(**given).total_seconds()
    except TypeError as error:
        raise ConfigurationError(
            f"{what}: give the arguments of timedelta, such as {{'hours': 2}} ({error})."
        ) from None


def _examples(units: Sequence[str]) -> str:
    shown = {"steps": "1000 steps", "epochs": "2 epochs", "tokens": "1e9 tokens", "samples": "5e6 samples"}
    return _listed([repr({**shown, "seconds": "30 min"}[unit]) for unit in units])


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
