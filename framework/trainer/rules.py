"""Rules of single arguments of a Trainer: each checks a value and returns the resolved value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError, is_count, unknown
from ..core.intervals import Interval, parse_duration
from ..profiling.advanced_profiler import AdvancedProfiler
from ..profiling.profiler import PassThroughProfiler, Profiler
from ..profiling.simple_profiler import SimpleProfiler
from ..profiling.torch_profiler import PyTorchProfiler
from ..storage.cached_url import local_place

Limit = int | float
Rule = Callable[[str, Any], Any]
"""Takes the name and the value of an argument; returns the value to use, or raises ``ConfigurationError``."""
_FRACTION = re.compile(r"\s*(0?\.[0-9]+|1(?:\.0+)?)\s*epochs?\s*")
_PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "torch": PyTorchProfiler,
    "pytorch": PyTorchProfiler,
}


def at_least(least: int) -> Rule:
    """Return the rule of whole numbers of at least ``least``; None means that no number was given."""

    def rule(name: str, value: Any) -> Any:
        if value is not None and not is_count(value, least):
            raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}.")
        return value

    return rule


def one_of(*names: str, optional: bool = False) -> Rule:
    """Return the rule of a choice among names."""

    def rule(name: str, value: Any) -> Any:
        if value not in names and not (optional and value is None):
            raise unknown(name, str(value), names)
        return value

    return rule


def snapshot_interval(name: str, value: Any) -> Any:
    """Rule of ``snapshots``: steps, a time, ``"auto"``, False for never, None for the default."""
    if value is None or value is False or value == "auto" or is_count(value, 1):
        return value
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}={value!r}: give a number of optimizer steps, of at least 1, 'auto' or False.")
    found = Interval.parse(value, name, units=("steps", "seconds"))
    return found.number if found.unit == "steps" else value


def flag(name: str, value: Any) -> Any:
    """Rule of switches: True, False, or None if the default is chosen later."""
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be True or False.")
    return value


def batch_limit(name: str, value: Any) -> Limit:
    """Rule of numbers of batches: an int counts batches, a float is a fraction of all; None means all."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or (
        isinstance(value, float) and value > 1.0
    ):  # fmt: skip
        raise ConfigurationError(
            f"{name}={value!r} must be a number of batches (an int from 0) or a fraction (a float from 0.0 to 1.0)."
        )
    return value


def interval(name: str, value: Any) -> Limit | timedelta | Interval:
    """Rule of ``val_check_interval``: batches, a fraction of an epoch, a time, or a text of ``Interval``."""
    if isinstance(value, str) and (fraction := _FRACTION.fullmatch(value)) is not None:
        return interval(name, float(fraction[1]))
    if isinstance(value, str):
        found = Interval.parse(value, name)
        return timedelta(seconds=found.number) if found.unit == "seconds" else found
    if isinstance(value, (dict, timedelta)):
        return duration_above_zero(name, value)
    limit = batch_limit(name, value)
    if not limit:
        raise ConfigurationError(
            f"{name}={value} would never validate: leave it out, and set limit_val_batches=0 for that."
        )
    return limit


def optional_interval(name: str, value: Any) -> Interval | None:
    """Rule of limits in any unit, that may be None."""
    return None if value is None else Interval.parse(value, name)


def counted_in(unit: str, rule: Rule) -> Rule:
    """Return a rule of numbers that also takes a text with their unit, such as ``"1000 steps"``."""

    def text_or_number(name: str, value: Any) -> Any:
        return rule(name, Interval.parse(value, name, units=(unit,)).number if isinstance(value, str) else value)

    return text_or_number


def duration_above_zero(name: str, value: Any) -> timedelta:
    """Rule of times: ``"30 min"``, ``"DD:HH:MM:SS"``, a dict of ``timedelta`` arguments, or a ``timedelta``."""
    found = parse_duration(value, name)
    if found <= timedelta(0):
        raise ConfigurationError(f"{name}={value!r} must be longer than zero.")
    return found


def optional_duration(name: str, value: Any) -> timedelta | None:
    """Rule of times that may be None."""
    return None if value is None else duration_above_zero(name, value)


def dev_run(name: str, value: Any) -> int:
    """Rule of ``fast_dev_run``: a switch, or a number of batches."""
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name}={value!r} must be True, False or a number of batches from 0.")
    return int(value)


def directory(name: str, value: Any) -> Path:
    """Rule of directories; None means the working directory."""
    if value is None:
        return Path.cwd()
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name}={value!r} must be a path.")
    return local_place(value).absolute()


def positive_number(name: str, value: Any) -> float | None:
    """Rule of numbers above 0; None means that no number was given."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ConfigurationError(f"{name}={value!r} must be a number above 0.")
    return None if value is None else float(value)


def deterministic(name: str, value: Any) -> Any:
    """Rule of ``deterministic``."""
    if value not in (None, True, False, "warn"):
        raise ConfigurationError(f"{name}={value!r} must be True, False or 'warn'.")
    return value


def resolve_profiler(name: str, given: Any) -> Profiler:
    """Rule of ``profiler``: a name, an object, or None.

    Raises:
        UnknownNameError: the name is not known.
        ConfigurationError: it is another object.
    """
    if given is None:
        return PassThroughProfiler()
    if isinstance(given, str):
        if given not in _PROFILERS:
            raise unknown(name, given, list(_PROFILERS))
        return _PROFILERS[given]()
    if not isinstance(given, Profiler):
        hint = f" Pass an instance: {given.__name__}()." if isinstance(given, type) else ""
        raise ConfigurationError(f"{name}={given!r} must be None, one of {', '.join(_PROFILERS)}, or a Profiler.{hint}")
    return given


def unsupported(advice: str) -> Rule:
    """Return the rule of an argument of Lightning that phalanx does not support: it must be None."""

    def rule(name: str, value: Any) -> None:
        if value is not None:
            raise ConfigurationError(f"{name} is not supported (must be None): {advice}.")

    return rule
