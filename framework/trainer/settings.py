"""The Trainer's arguments, checked and resolved before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.accumulation import AccumulationSchedule, resolve_accumulation
from ..core.errors import ConfigurationError, is_count, unknown
from ..parallel.optimizer_step import check_clipping

NONFINITE = ("raise", "skip", "ignore")
DEBUG = ("collectives",)
Limit = int | float

_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


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
    debug: str | None
    fast_dev_run: int
    barebones: bool
    detect_anomaly: bool
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
                    f"{_LIMITS[stage]}={limit} is a fraction, but the loader has no length: give a whole number."
                )
            return 0 if limit == 0.0 else None
        # A fraction that is not 0 keeps at least one batch.
        return max(1, int(total * limit)) if limit and total else 0


def resolve_settings(
    *,
    max_epochs: int | None,
    min_epochs: int | None,
    max_steps: int | None,
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
    debug: str | None,
    fast_dev_run: bool | int,
    barebones: bool,
    detect_anomaly: bool,
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
        check_count(name, value, least)
    limits = {
        stage: _limit(_LIMITS[stage], value)
        for stage, value in (
            ("train", limit_train_batches),
            ("validate", limit_val_batches),
            ("test", limit_test_batches),
            ("predict", limit_predict_batches),
        )
    }
    overfit = _limit("overfit_batches", overfit_batches)
    dev = _fast_dev_run(fast_dev_run)
    interval = _interval(val_check_interval, check_val_every_n_epoch)
    if nonfinite not in NONFINITE:
        raise unknown("nonfinite", str(nonfinite), NONFINITE)
    if debug is not None and debug not in DEBUG:
        raise unknown("debug", str(debug), DEBUG)
    _check_order("min_epochs", min_epochs, "max_epochs", max_epochs)
    _check_order("min_steps", min_steps, "max_steps", max_steps)
    if overfit:
        _refuse_both("overfit_batches", overfit_batches, "both say how many batches to use",
                     limit_train_batches=limit_train_batches, limit_val_batches=limit_val_batches)  # fmt: skip
    if barebones:
        _refuse_both("barebones", True, "it leaves out whatever costs time",
                     fast_dev_run=fast_dev_run or None, detect_anomaly=detect_anomaly or None,
                     num_sanity_val_steps=num_sanity_val_steps)  # fmt: skip
    duration = resolve_duration("max_time", max_time) if max_time is not None else None
    if dev:
        limits = dict.fromkeys(limits, dev)
        max_epochs, max_steps, min_epochs, min_steps, duration = 1, dev, None, None, None
        num_sanity_val_steps, overfit, interval, check_val_every_n_epoch, log_every_n_steps = 0, 0, 1.0, 1, 1
    if overfit:
        limits["train"] = limits["validate"] = overfit
    if max_epochs is None and max_steps in (None, -1) and duration is None:
        max_epochs = 1000
    return Settings(
        max_epochs=max_epochs,
        min_epochs=min_epochs,
        max_steps=-1 if max_steps is None else max_steps,
        min_steps=min_steps,
        max_time=duration,
        limits=limits,
        overfit_batches=overfit,
        val_check_interval=interval,
        check_val_every_n_epoch=check_val_every_n_epoch,
        num_sanity_val_steps=0 if barebones else 2 if num_sanity_val_steps is None else num_sanity_val_steps,
        # 0 means never; a number that no count of steps reaches spares the loop a second question.
        log_every_n_steps=(0 if barebones else 50 if log_every_n_steps is None else log_every_n_steps) or 1 << 62,
        accumulation=resolve_accumulation(accumulate_grad_batches),
        clipping=check_clipping(gradient_clip_val, gradient_clip_algorithm),
        nonfinite=nonfinite,
        debug=debug,
        fast_dev_run=dev,
        barebones=barebones,
        detect_anomaly=detect_anomaly,
        reload_every=reload_dataloaders_every_n_epochs,
        root=_root(default_root_dir),
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


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number of at least ``least``; None is one that was not given.

    Raises:
        ConfigurationError: naming the argument.
    """
    if value is not None and not is_count(value, least):
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


def _interval(value: Any, every_n_epoch: int | None) -> Limit | timedelta:
    if isinstance(value, (str, dict, timedelta)):
        return resolve_duration("val_check_interval", value)
    limit = 1.0 if value is None else _limit("val_check_interval", value)
    if not limit:
        raise ConfigurationError(
            f"val_check_interval={value} would never validate: leave it out, and set limit_val_batches=0 for that."
        )
    if every_n_epoch is None and isinstance(limit, float):
        raise ConfigurationError(
            f"check_val_every_n_epoch=None with val_check_interval={value}: without epochs there is no fraction of "
            "one; give val_check_interval as a number of batches or as a time."
        )
    return limit


def _check_order(low: str, lowest: int | None, high: str, highest: int | None) -> None:
    if lowest is not None and highest is not None and 0 <= highest < lowest:
        raise ConfigurationError(f"{low}={lowest} is larger than {high}={highest}: give {low} at most {high}.")


def _refuse_both(name: str, value: Any, reason: str, **others: Any) -> None:
    for other, given in others.items():
        if given is not None:
            raise ConfigurationError(
                f"{name}={value} and {other}={given} contradict one another: {reason}. Leave one of them out."
            )


def _root(given: Any) -> Path:
    if given is None:
        return Path.cwd()
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigurationError(f"default_root_dir={given!r} must be a path.")
    return Path(given).expanduser().absolute()


def _fast_dev_run(value: bool | int) -> int:
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"fast_dev_run={value!r} must be True, False or a number of batches from 0.")
    return int(value)
