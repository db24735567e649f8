"""The callbacks and loggers of a Trainer: given as objects, by name, or by default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .callback import Callback
from .errors import ConfigurationError
from .logger import Logger
from .registry import CALLBACKS, LOGGERS
from .settings import Settings


def resolve_loggers(given: Any, settings: Settings) -> list[Logger]:
    """Return the loggers for an object, a name, True (TensorBoard), False or None, or a list of objects and names.

    Raises:
        UnknownNameError: a name is not known.
        ConfigurationError: something is no logger.
    """
    if settings.barebones or settings.fast_dev_run:
        return []
    if given is None or given is True:
        given = "tensorboard"
    if given is False:
        return []
    items = given if isinstance(given, Iterable) and not isinstance(given, (str, Logger)) else [given]
    return [_built(LOGGERS, item, Logger, "logger") for item in items]


def resolve_callbacks(
    given: Any,
    settings: Settings,
    enable_checkpointing: bool | None,
    enable_progress_bar: bool | None,
    enable_model_summary: bool | None,
) -> list[Callback]:
    """Return the callbacks of the user, then those that are there by default and not the user's already.

    Raises:
        UnknownNameError: a name is not known.
        ConfigurationError: something is no callback, two share a state key, or two arguments contradict one another.
    """
    items = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    callbacks = [_built(CALLBACKS, item, Callback, "callback") for item in items]
    if settings.barebones:
        if callbacks:
            raise ConfigurationError("barebones=True runs no callbacks: leave them out, or leave barebones out.")
        return []
    development = bool(settings.fast_dev_run)
    if settings.max_time is not None and not development:
        timer = CALLBACKS.load("timer")
        if _has(callbacks, timer):
            raise ConfigurationError("max_time and a Timer callback both limit the time: leave one of them out.")
        callbacks.append(timer(duration=settings.max_time))
    if settings.accumulation.constant != 1 and _has(callbacks, CALLBACKS.load("gradient_accumulation_scheduler")):
        raise ConfigurationError(
            f"accumulate_grad_batches={settings.accumulation} and a GradientAccumulationScheduler contradict one another: "
            "leave one of them out."
        )
    for name, wanted in (
        ("model_summary", enable_model_summary),
        ("progress_bar", enable_progress_bar),
        ("model_checkpoint", enable_checkpointing),
    ):
        if wanted is False and not items:
            continue
        kind = CALLBACKS.load(name)
        present = _has(callbacks, kind)
        if present and wanted is False and name == "model_checkpoint":
            raise ConfigurationError(
                "enable_checkpointing=False contradicts the ModelCheckpoint among the callbacks: leave one of them out."
            )
        if wanted is not False and not present and not (development and name == "model_checkpoint"):
            callbacks.append(kind())
    if development:
        callbacks = [callback for callback in callbacks if not isinstance(callback, CALLBACKS.load("model_checkpoint"))]
    check_state_keys(callbacks)
    return callbacks


def check_state_keys(callbacks: Sequence[Callback]) -> None:
    """Refuse two callbacks whose states a checkpoint could not tell apart.

    Raises:
        ConfigurationError: two have the same state key.
    """
    keys: set[str] = set()
    for callback in callbacks:
        if callback.state_key in keys:
            raise ConfigurationError(
                f"two callbacks have the state key {callback.state_key!r}, so a checkpoint could not tell their states "
                "apart: leave one out, or override state_key."
            )
        keys.add(callback.state_key)


def _has(callbacks: Sequence[Callback], kind: type[Any]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _built(registry: Any, item: Any, kind: type[Any], what: str) -> Any:
    built = registry.load(item)() if isinstance(item, str) else item
    if isinstance(built, kind):
        return built
    made = (
        f"{built.__name__}, a class: make an object of it" if isinstance(built, type) else f"a {type(built).__name__}"
    )
    raise ConfigurationError(f"{made} was given as a {what}; give a {kind.__name__} or a name: {', '.join(registry)}.")
