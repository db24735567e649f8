"""The Trainer's arguments, checked and resolved before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from .accumulation import AccumulationSchedule, resolve_accumulation
from .errors import ConfigurationError, unknown
from .update import check_clipping

NONFINITE = ("raise", "skip", "ignore")
Limit = int | float


@dataclass
class Settings:
    """What a Trainer was asked for, resolved."""

    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: timedelta | None
    limits: dict[str, Limit]
    """Of ``"train"``, ``"validate"``, ``"test"``, ``"predict"``: a fraction as float, a number of batches as int."""
    overfit_batches: Limit
    val_check_interval: Limit | timedelta
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    log_every_n_steps: int
    accumulation: AccumulationSchedule
    clipping: tuple[float | None, str]
    nonfinite: str
    fast_dev_run: int
    barebones: bool
    reload_every: int
    root: Path

    def limit_batches(self, stage: str, total: int | None) -> int | None:
        """Return how many of ``total`` batches a stage may use; None means all of an unknown number."""
        limit = self.limits[stage]
        if isinstance(limit, int):
            return limit if total is None else min(limit, total)
        if total is None:
            if limit not in (0.0, 1.0):
                raise ConfigurationError(
                    f"limit_{stage}_batches={limit} is a fraction, but the loader has no length: give a whole number."
                )
            return 0 if limit == 0.0 else None
        # A fraction that is not 0 keeps at least one batch.
        return max(1, int(total * limit)) if limit and total else 0


def resolve_settings(
    *,
    max_epochs: int | None,
    min_epochs: int | None,
    max_steps: int,
    min_steps: int | None,
    max_time: Any,
    limit_train_batches: Limit | None,
    limit_val_batches: Limit | None,
    limit_test_batches: Limit | None,
    limit_predict_batches: Limit | None,
    overfit_batches: Limit,
    val_check_interval: Any,
    check_val_every_n_epoch: int | None,
    num_sanity_val_steps: int | None,
    log_every_n_steps: int | None,
    accumulate_grad_batches: Any,
    gradient_clip_val: float | None,
    gradient_clip_algorithm: str | None,
    nonfinite: str,
    fast_dev_run: int | bool,
    barebones: bool,
    reload_dataloaders_every_n_epochs: int,
    default_root_dir: str | Path | None,
) -> Settings:
    """Check all arguments; see ``Trainer`` for their meaning.

    Raises:
        ConfigurationError: one breaks a rule, or two contradict one another.
    """
    for name, value, least in (
        ("max_epochs", max_epochs, -1),
        ("min_epochs", min_epochs, 0),
        ("max_steps", max_steps, -1),
        ("min_steps", min_steps, 0),
        ("check_val_every_n_epoch", check_val_every_n_epoch, 1),
        ("num_sanity_val_steps", num_sanity_val_steps, -1),
        ("log_every_n_steps", log_every_n_steps, 0),
        ("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, 0),
    ):
        _check_count(name, value, least)
    limits = {
        "train": _limit("limit_train_batches", limit_train_batches),
        "validate": _limit("limit_val_batches", limit_val_batches),
        "test": _limit("limit_test_batches", limit_test_batches),
        "predict": _limit("limit_predict_batches", limit_predict_batches),
    }
    overfit = _limit("overfit_batches", overfit_batches)
    if overfit and (limit_train_batches is not None or limit_val_batches is not None):
        given = "limit_train_batches" if limit_train_batches is not None else "limit_val_batches"
        raise ConfigurationError(
            f"overfit_batches={overfit_batches} and {given} contradict one another: both say how many batches to use. "
            "Leave one out."
        )
    if nonfinite not in NONFINITE:
        raise unknown("nonfinite", str(nonfinite), NONFINITE)
    for low, high, lowest, highest in (
        ("min_epochs", "max_epochs", min_epochs, max_epochs),
        ("min_steps", "max_steps", min_steps, max_steps),
    ):
        if lowest is not None and highest is not None and 0 <= highest < lowest:
            raise ConfigurationError(f"{low}={lowest} is larger than {high}={highest}.")
    duration = resolve_duration("max_time", max_time) if max_time is not None else None
    dev = _fast_dev_run(fast_dev_run)
    if dev:
        limits = dict.fromkeys(limits, dev)
        max_epochs, max_steps, min_epochs, min_steps = 1, dev, None, None
        num_sanity_val_steps, overfit, val_check_interval, log_every_n_steps = 0, 0, 1.0, 1
    if overfit:
        limits["train"] = limits["validate"] = overfit
    if max_epochs is None and max_steps == -1 and duration is None:
        max_epochs = 1000
    return Settings(
        max_epochs=max_epochs,
        min_epochs=min_epochs,
        max_steps=max_steps,
        min_steps=min_steps,
        max_time=duration,
        limits=limits,
        overfit_batches=overfit,
        val_check_interval=_interval(val_check_interval),
        check_val_every_n_epoch=check_val_every_n_epoch,
        num_sanity_val_steps=0 if barebones else 2 if num_sanity_val_steps is None else num_sanity_val_steps,
        # 0 means never; a number that no count of steps reaches spares the loop a second question.
        log_every_n_steps=(50 if log_every_n_steps is None else log_every_n_steps) or 1 << 62,
        accumulation=resolve_accumulation(accumulate_grad_batches),
        clipping=check_clipping(gradient_clip_val, gradient_clip_algorithm),
        nonfinite=nonfinite,
        fast_dev_run=dev,
        barebones=barebones,
        reload_every=reload_dataloaders_every_n_epochs,
        root=Path(default_root_dir) if default_root_dir is not None else Path.cwd(),
    )


def resolve_duration(name: str, given: Any) -> timedelta:
    """Return the time that ``"DD:HH:MM:SS"``, a dict of ``timedelta`` arguments or a ``timedelta`` stands for.

    Raises:
        ConfigurationError: it is none of these, or not positive.
    """
    rule = "must be a timedelta, a dict such as {'hours': 2}, or a string 'DD:HH:MM:SS'"
    try:
        if isinstance(given, str):
            days, hours, minutes, seconds = (int(part) for part in given.split(":"))
            duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(given, dict):
            duration = timedelta(**given)
        else:
            duration = given
        positive = duration > timedelta(0)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name}={given!r} {rule}.") from None
    if not positive:
        raise ConfigurationError(f"{name}={given!r} must be longer than zero.")
    return duration


def _check_count(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}.")


def _limit(name: str, value: Any) -> Limit:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or (
        isinstance(value, float) and value > 1.0
    ):  # fmt: skip
        raise ConfigurationError(
            f"{name}={value!r} must be a number of batches (an int from 0) or a fraction (a float from 0.0 to 1.0)."
        )
    return value


def _interval(value: Any) -> Limit | timedelta:
    if value is None:
        return 1.0
    if isinstance(value, (str, dict, timedelta)):
        return resolve_duration("val_check_interval", value)
    limit = _limit("val_check_interval", value)
    if not limit:
        raise ConfigurationError("val_check_interval=0 never validates: leave it out, and set limit_val_batches=0.")
    return limit


def _fast_dev_run(value: int | bool) -> int:
    if not isinstance(value, (bool, int)) or value < 0:
        raise ConfigurationError(f"fast_dev_run={value!r} must be True, False or a number of batches from 0.")
    return int(value)
