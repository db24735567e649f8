"""Comparison of a monitored metric, and the error for a metric that was not logged."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ..core.errors import ConfigurationError, MetricError, did_you_mean

# Names of different metrics of one validation, such as 'val_loss' and 'val_loss_ema', are less similar than this.
_NEARLY = 0.85


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


def misspelled_metric(who: str, name: str, logged: Iterable[str]) -> str | None:
    """Return a note for a metric that was not logged while one of nearly the same name was; None for another one."""
    names = set(logged)
    close = () if name in names else get_close_matches(name, names, n=1, cutoff=_NEARLY)
    if not close:
        return None
    return (
        f"{who} needs the metric {name!r}, which the sanity check of the validation did not log. Did you mean "
        f"{close[0]!r}? If training does not log {name!r} either, the fit ends with an error where it is needed."
    )


def missing_metric(who: str, name: str, known: Iterable[str]) -> MetricError:
    """Build the error for a metric that was not logged: closest match first, then what was logged."""
    names = sorted(known)
    return MetricError(
        f"{who} needs the metric {name!r}, which was not logged.{did_you_mean(name, names)} "
        f"Logged: {', '.join(names) or 'nothing'}."
    )
