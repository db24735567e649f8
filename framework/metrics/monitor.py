"""Comparison of a monitored metric, and the error for a metric that was not logged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from ..core.errors import ConfigurationError, MetricError, did_you_mean

# Names of different metrics of one validation, such as 'val_loss' and 'val_loss_ema', are less similar than this.
_NEARLY = 0.85
_HIGHER_IS_BETTER = {"accuracy", "acc", "f1", "auc", "auroc", "ap", "map", "bleu", "rouge", "score"}
_HIGHER_IS_BETTER |= {"iou", "miou", "dice", "precision", "recall", "psnr", "ssim"}
_LOWER_IS_BETTER = {"loss", "error", "err"}


def given_mode(who: str, mode: str | None) -> str:
    """Return the mode of a callback that monitors a metric, ``"min"`` by default.

    Raises:
        ConfigurationError: it is neither ``"min"`` nor ``"max"``.
    """
    if mode is None:
        return "min"
    if mode not in ("min", "max"):
        meant = did_you_mean(str(mode), ("min", "max", "minimum", "maximum")).replace("imum", "")
        raise ConfigurationError(f"{who}(mode={mode!r}): give 'min' where less is better, or 'max'.{meant}")
    return mode


def doubtful_mode(who: str, monitor: str | None, mode: str | None) -> str | None:
    """Return a note on a metric that is better when it is higher, by its name, where no ``mode`` was given."""
    if mode is not None or not isinstance(monitor, str):
        return None
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*", monitor)}
    words |= {word.rstrip("0123456789") for word in words}
    if words.isdisjoint(_HIGHER_IS_BETTER) or not words.isdisjoint(_LOWER_IS_BETTER):
        return None
    return (
        f"{who}(monitor={monitor!r}) takes the lowest value for the best, as its mode is 'min' by default: give "
        "mode='max' if higher values are better, or mode='min' to say that lower ones are."
    )


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


def _stage_of(name: str) -> str:
    """Return the stage that the name of a metric begins with, such as ``"val"``; empty without one."""
    stage = re.match(r"(train|val|test)[a-z]*(?![a-z])", name.lower())
    return stage[1] if stage is not None else ""


def missing_metric(who: str, name: str, known: Iterable[str]) -> MetricError:
    """Build the error for a metric that was not logged: closest match first, then what was logged."""
    names = sorted(known)
    # The same metric of another stage is not a misspelling.
    stage = _stage_of(name)
    alike = [other for other in names if _stage_of(other) == stage]
    return MetricError(
        f"{who} needs the metric {name!r}, which was not logged.{did_you_mean(name, alike)} "
        f"Logged: {', '.join(names) or 'nothing'}."
    )
