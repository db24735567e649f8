"""Comparison of a monitored metric, and the error for a metric that was not logged."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.errors import ConfigurationError, MetricError, did_you_mean


def check_mode(who: str, mode: str) -> None:
    """Refuse a mode that is neither ``"min"`` nor ``"max"``.

    Raises:
        ConfigurationError: it is something else.
    """
    if mode not in ("min", "max"):
        hint = did_you_mean(str(mode), ("min", "max", "minimum", "maximum"))
        meant = hint.replace("imum", "") if hint else ""
        raise ConfigurationError(f"{who}(mode={mode!r}): give 'min' where less is better, or 'max'.{meant}")


def is_better(value: float, than: float, mode: str) -> bool:
    """Whether a value is strictly better than another. Any comparison with NaN is False."""
    return value < than if mode == "min" else value > than


def missing_metric(who: str, name: str, known: Iterable[str]) -> MetricError:
    """Build the error for a metric that was not logged: closest match first, then what was logged."""
    names = sorted(known)
    return MetricError(
        f"{who} needs the metric {name!r}, which was not logged.{did_you_mean(name, names)} "
        f"Logged: {', '.join(names) or 'nothing'}."
    )
