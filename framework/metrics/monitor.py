"""What callbacks that watch a metric have in common: better or worse, and the error for a metric nobody logged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError, MetricError, did_you_mean

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


def check_mode(who: str, mode: str) -> None:
    """Refuse a mode that is neither ``"min"`` nor ``"max"``.

    Raises:
        ConfigurationError: it is something else.
    """
    if mode not in ("min", "max"):
        raise ConfigurationError(f"{who}(mode={mode!r}): give 'min' where less is better, or 'max'.")


def is_better(value: float, than: float, mode: str) -> bool:
    """Whether a value is strictly better than another; NaN is better than nothing, and nothing is better than NaN."""
    return value < than if mode == "min" else value > than


def missing_metric(who: str, name: str, known: Iterable[str]) -> MetricError:
    """Build the error for a metric that was not logged: closest match first, then what was logged."""
    names = sorted(known)
    return MetricError(
        f"{who} needs the metric {name!r}, which was not logged.{did_you_mean(name, names)} "
        f"Logged: {', '.join(names) or 'nothing'}."
    )


def acts_at_epoch_end(trainer: Trainer, choice: bool | None) -> bool:
    """Whether a metric is looked at when training epochs end, rather than after validations; ``choice`` None decides.

    One validation in each epoch comes right before the epoch's end, where the training's own metrics are known too.
    """
    if choice is not None:
        return choice
    interval = trainer.val_check_interval
    once = interval is None or (isinstance(interval, float) and interval == 1.0)
    return not trainer.val_enabled or (once and trainer.check_val_every_n_epoch == 1)
