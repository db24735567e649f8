"""The resolved settings of a Trainer, checked before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ..core.accumulation import AccumulationSchedule, resolve_accumulation
from ..core.errors import ConfigurationError
from ..core.global_batch import GlobalBatch, resolve_global_batch
from ..core.intervals import COUNTED, Interval
from ..parallel.activation_memory import ActivationMemory, activation_memory
from ..parallel.optimizer_step import check_clipping
from ..profiling.profiler import Profiler
from ..report.notifications import without_addresses
from ..system.environment import is_quiet
from .rules import Limit
from .settings import TrainerSettings

_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}
_NUMBERS = ("max_epochs", "max_steps", "log_every_n_steps", "snapshots", "verify_every")
"""The arguments that are numbers, or texts with their unit."""
_DEFAULT_EPOCHS = 1000
NEVER = 1 << 62
"""A count that no run reaches, so that "never" needs no extra branch in the loop."""


@dataclass
class Settings:
    """The settings of a Trainer, checked and resolved."""

    given: TrainerSettings
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: timedelta | None
    max_units: Interval | None
    """The tokens or samples to train; None for no limit."""
    limits: dict[str, Limit]
    """For ``"train"``, ``"validate"``, ``"test"``, ``"predict"``: a fraction as float, a number of batches as int."""
    overfit_batches: Limit
    val_check_interval: Limit | timedelta | Interval
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    log_every_n_steps: int
    verify_every: int | None
    accumulation: AccumulationSchedule
    global_batch: GlobalBatch | None
    clipping: tuple[float | None, str]
    fast_dev_run: int
    root: Path
    preemption_signals: tuple[str, ...]
    preemption_notices: str | bool
    time_limit_margin: timedelta
    stall_limits: tuple[float, ...]
    profiler: Profiler
    memory: ActivationMemory | None
    notify: tuple[str, ...]
    """The addresses to which the events of a fit are sent."""

    @property
    def barebones(self) -> bool:
        """Whether all optional features that cost time are disabled."""
        return self.given.barebones

    @property
    def verbose(self) -> bool:
        """Whether the run shows more than warnings and errors."""
        return self.given.verbose and not self.given.barebones and not is_quiet()

    @property
    def shards_data(self) -> bool:
        """Whether loaders are sharded over ranks."""
        return self.given.use_distributed_sampler

    def without_addresses(self, text: str) -> str:
        """Return a text without what may be secret in the addresses for notifications."""
        return without_addresses(text, self.given.notify)

    def limit_batches(self, stage: str, total: int | None) -> int | None:
        """Return the number of batches of ``total`` that a stage may use; None means all of an unknown number."""
        limit = self.limits[stage]
        if isinstance(limit, int):
            return limit if total is None else min(limit, total)
        if total is None:
            if limit not in (0.0, 1.0):
                raise ConfigurationError(
                    f"{_LIMITS[stage]}={limit} is a fraction, but the loader has no length: give a whole number."
                )
            return 0 if limit == 0.0 else None
        # A fraction above 0 uses at least one batch.
        return max(1, int(total * limit)) if limit and total else 0


T = TypeVar("T")


class Setting(Generic[T]):
    """A read-only attribute of a Trainer with one of its settings. Assigning it raises ``ConfigurationError``."""

    def __init__(self, read: Callable[[Settings], T]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> T:
        return self._read(trainer.settings)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise ConfigurationError(f"trainer.{self._name} is read when the Trainer is created: pass it to Trainer(...).")


def resolve_settings(given: TrainerSettings) -> Settings:
    """Apply every rule, then the rules between arguments.

    Raises:
        ConfigurationError: an argument is invalid, or two contradict one another.
    """
    value = {
        each.name: getattr(given, each.name)
        if each.metadata["rule"] is None
        else each.metadata["rule"](each.name, getattr(given, each.name))
        for each in fields(given)
    }
    # Texts of numbers are these numbers from here on.
    given = replace(given, **{name: value[name] for name in _NUMBERS})
    _check_combinations(given, value["val_check_interval"])
    limits = _limits(given, value["max_time"], value["duration"])
    check_interval, check_epochs = _validation(value["val_check_interval"], given.check_val_every_n_epoch)
    sanity, log_every = given.num_sanity_val_steps, given.log_every_n_steps
    settings = Settings(
        given=given,
        max_epochs=limits.epochs,
        min_epochs=given.min_epochs,
        max_steps=limits.steps,
        min_steps=given.min_steps,
        max_time=limits.time,
        max_units=limits.units,
        limits={stage: value[name] for stage, name in _LIMITS.items()},
        overfit_batches=value["overfit_batches"],
        val_check_interval=check_interval,
        check_val_every_n_epoch=check_epochs,
        num_sanity_val_steps=0 if given.barebones else 2 if sanity is None else sanity,
        log_every_n_steps=(0 if given.barebones else 50 if log_every is None else int(log_every)) or NEVER,
        verify_every=value["verify_every"],
        accumulation=resolve_accumulation(given.accumulate_grad_batches),
        global_batch=resolve_global_batch(given.global_batch_size, given.micro_batch_size),
        clipping=check_clipping(given.gradient_clip_val, given.gradient_clip_algorithm),
        fast_dev_run=value["fast_dev_run"],
        root=value["default_root_dir"],
        preemption_signals=value["preemption_signals"],
        preemption_notices=value["preemption_notices"],
        time_limit_margin=value["time_limit_margin"],
        stall_limits=value["stall_timeout"],
        profiler=value["profiler"],
        memory=activation_memory(given.memory, compiles=given.compile not in (False, None)),
        notify=() if value["fast_dev_run"] else value["notify"],
    )
    if settings.fast_dev_run:
        _limit_to_dev_run(settings, settings.fast_dev_run)
    elif settings.overfit_batches:
        settings.limits["train"] = settings.limits["validate"] = settings.overfit_batches
    return settings


def _limit_to_dev_run(settings: Settings, batches: int) -> None:
    """Reduce a run to a number of batches of each loop, which overrides other limits."""
    settings.limits = dict.fromkeys(settings.limits, batches)
    settings.max_epochs, settings.max_steps, settings.max_time, settings.max_units = 1, batches, None, None
    settings.min_epochs = settings.min_steps = None
    settings.num_sanity_val_steps, settings.overfit_batches = 0, 0
    settings.val_check_interval, settings.check_val_every_n_epoch, settings.log_every_n_steps = 1.0, 1, 1


class _Limits(NamedTuple):
    """The limits of a fit."""

    epochs: int | None
    steps: int
    time: timedelta | None
    units: Interval | None


def _limits(given: TrainerSettings, max_time: timedelta | None, duration: Interval | None) -> _Limits:
    """Return the limits of a fit, that of ``duration`` included."""
    epochs, steps = _number(given.max_epochs), _number(given.max_steps)
    steps = -1 if steps is None else steps
    if duration is None:
        if epochs is None and steps == -1 and max_time is None:
            epochs = _DEFAULT_EPOCHS
        return _Limits(epochs, steps, max_time, None)
    same = {
        "epochs": ("max_epochs", epochs), "steps": ("max_steps", None if steps == -1 else steps),
        "seconds": ("max_time", max_time),
    }.get(duration.unit)  # fmt: skip
    if same is not None and same[1] is not None:
        raise ConfigurationError(
            f"duration={str(duration)!r} and {same[0]}={same[1]} limit the same number: leave one of them out."
        )
    return _Limits(
        duration.number_of("epochs") or epochs,
        duration.number_of("steps") or steps,
        duration.time or max_time,
        duration if duration.unit in COUNTED else None,
    )


def _number(value: int | str | None) -> int | None:
    return None if value is None else int(value)


def _validation(
    interval: Limit | timedelta | Interval, every: int | None
) -> tuple[Limit | timedelta | Interval, int | None]:
    """Return the intervals of validations within epochs, and in epochs."""
    if not isinstance(interval, Interval):
        return interval, every
    if every not in (1, None):
        raise ConfigurationError(
            f"val_check_interval={str(interval)!r} counts over epochs, and check_val_every_n_epoch={every} counts them "
            "too: leave one of them out."
        )
    return (1.0, int(interval.number)) if interval.unit == "epochs" else (interval, every)


def _check_combinations(given: TrainerSettings, check_interval: Limit | timedelta | Interval) -> None:
    """Refuse arguments that contradict one another."""
    if given.check_val_every_n_epoch is None and isinstance(check_interval, float):
        raise ConfigurationError(
            f"check_val_every_n_epoch=None with val_check_interval={given.val_check_interval}: without epochs there is "
            "no fraction of one; give val_check_interval as a number of batches or as a time."
        )
    if given.global_batch_size is not None and given.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"global_batch_size={given.global_batch_size} sets how many micro-batches an optimizer step has, and so "
            f"does accumulate_grad_batches={given.accumulate_grad_batches}: leave one of them out."
        )
    _check_order("min_epochs", given.min_epochs, "max_epochs", _number(given.max_epochs))
    _check_order("min_steps", given.min_steps, "max_steps", _number(given.max_steps))
    if given.barebones:
        others = {
            "fast_dev_run": given.fast_dev_run or None, "detect_anomaly": given.detect_anomaly or None,
            "num_sanity_val_steps": given.num_sanity_val_steps, "profiler": given.profiler,
        }  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise ConfigurationError(
                    f"barebones=True and {name}={value} contradict one another: it disables all features that cost "
                    "time. Leave one of them out."
                )


def _check_order(low: str, lowest: int | None, high: str, highest: int | None) -> None:
    if lowest is not None and highest is not None and 0 <= highest < lowest:
        raise ConfigurationError(f"{low}={lowest} is larger than {high}={highest}: give {low} at most {high}.")
