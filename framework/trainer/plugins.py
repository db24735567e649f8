"""The callbacks and loggers of a Trainer: given as objects, by name, or by default."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..api.callback import Callback
from ..core.errors import ConfigurationError
from ..core.registry import CALLBACKS, LOGGERS, Registry, as_list
from ..metrics.logger import Logger
from ..system.environment import assigned_run
from .hook_names import check_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .resolved_settings import Settings

_SWITCHES = {
    "model_summary": "enable_model_summary",
    "progress_bar": "enable_progress_bar",
    "model_checkpoint": "enable_checkpointing",
}


def resolve_loggers(given: Any, settings: Settings) -> list[Logger]:
    """Return the loggers for an object, a name, True (TensorBoard), False or None, or a list of objects and names.

    Raises:
        UnknownNameError: a name is not known.
        ConfigurationError: an object is not a logger.
    """
    if given is False or (given is None and settings.barebones):
        return []
    if settings.barebones:
        raise ConfigurationError(
            f"barebones=True keeps no logs, but logger={given!r} was given: leave one of them out."
        )
    if given is None or given is True:
        given = "tensorboard"
    loggers = [_built(LOGGERS, item, Logger, "logger") for item in as_list(given)]
    return [] if settings.fast_dev_run else loggers


def resolve_callbacks(settings: Settings) -> list[Callback]:
    """Return the callbacks of the user, then the default callbacks that the user has not given.

    Raises:
        UnknownNameError: a name is not known.
        ConfigurationError: an object is not a callback, two share a state key, or two arguments contradict one another.
    """
    given = as_list(settings.given.callbacks)
    callbacks: list[Callback] = [_built(CALLBACKS, item, Callback, "callback") for item in given]
    defaults = {name: getattr(settings.given, switch) for name, switch in _SWITCHES.items()}
    if settings.barebones:
        wrong = next((f"{_SWITCHES[name]}=True" for name, wanted in defaults.items() if wanted), None)
        if callbacks or wrong:
            raise ConfigurationError(
                f"barebones=True runs no callbacks, but {wrong or 'callbacks'} was given: leave one of them out."
            )
        return []
    _add_timer(callbacks, settings)
    _check_accumulation(callbacks, settings)
    _add_defaults(callbacks, defaults)
    if (assigned := assigned_run()) is not None and assigned.pruning is not None:
        callbacks.append(CALLBACKS.load("optuna_pruning").of_sweep(**assigned.pruning))
    if settings.fast_dev_run:
        callbacks = [callback for callback in callbacks if not isinstance(callback, CALLBACKS.load("model_checkpoint"))]
    check_callbacks(callbacks)
    return callbacks


def _add_defaults(callbacks: list[Callback], defaults: dict[str, bool | None]) -> None:
    """Add the callbacks that a Trainer has by default, unless they were switched off or the user gave them."""
    for name, wanted in defaults.items():
        if wanted is not False:
            if not _has(callbacks, CALLBACKS.load(name)):
                callbacks.append(CALLBACKS.load(name)())
        elif name != "model_summary" and callbacks and (own := _has(callbacks, CALLBACKS.load(name))):
            raise ConfigurationError(
                f"{_SWITCHES[name]}=False contradicts the {type(own).__name__} among the callbacks: leave one of them "
                "out."
            )


def _add_timer(callbacks: list[Callback], settings: Settings) -> None:
    if settings.max_time is None:
        return
    timer = CALLBACKS.load("timer")
    if _has(callbacks, timer):
        raise ConfigurationError(
            f"max_time={settings.max_time} and a Timer callback both limit the time: leave one of them out."
        )
    callbacks.append(timer(duration=settings.max_time))


def _check_accumulation(callbacks: list[Callback], settings: Settings) -> None:
    whole = settings.global_batch
    if (settings.accumulation.constant == 1 and whole is None) or not callbacks:
        return
    if _has(callbacks, CALLBACKS.load("gradient_accumulation_scheduler")):
        given = f"accumulate_grad_batches={settings.accumulation}" if whole is None else str(whole)
        raise ConfigurationError(
            f"{given} and a GradientAccumulationScheduler contradict one another: leave one of them out."
        )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse misspelled hooks, and two callbacks with one state key, whose states a checkpoint could not distinguish.

    Raises:
        ConfigurationError: a hook is misspelled, or two callbacks have the same state key.
    """
    keys: set[str] = set()
    for callback in callbacks:
        check_names(type(callback), Callback)
        if type(callback).state_dict is Callback.state_dict:
            continue  # it has no state
        if callback.state_key in keys:
            raise ConfigurationError(
                f"two callbacks have the state key {callback.state_key!r}, so a checkpoint could not tell their states "
                "apart: leave one out, or override state_key."
            )
        keys.add(callback.state_key)


def _has(callbacks: Sequence[Callback], kind: type[Any]) -> Callback | None:
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _built(registry: Registry, item: Any, kind: type[Any], what: str) -> Any:
    built = _by_name(registry, item, what) if isinstance(item, str) else item
    if isinstance(built, kind):
        return built
    foreign = next(
        (cls for cls in getattr(built, "__mro__", type(built).__mro__) if cls.__name__ == kind.__name__), None
    )
    if foreign is not None and not issubclass(foreign, kind):
        hint = f"it is made for {foreign.__module__}; let its class derive from phalanx's {kind.__name__}"
    elif isinstance(built, type):
        hint = f"create an object of it, {built.__name__}(...)"
    else:
        hint = f"give a {kind.__name__} or one of the names {', '.join(registry)}"
    given = f"{built.__name__}, a class," if isinstance(built, type) else f"{built!r}"
    raise ConfigurationError(f"{given} was given as a {what}: {hint}.")


def _by_name(registry: Registry, name: str, what: str) -> Any:
    """Build the object for a name. A required name of a metric is the validation loss."""
    build = registry.load(name)
    defaults = default_arguments(build)
    if needed := [each for each in _required(build) if each not in defaults]:
        raise ConfigurationError(
            f"the {what} {name!r} cannot be given by name alone, since it needs {', '.join(needed)}: "
            f"give an object, {build.__name__}({', '.join(f'{each}=...' for each in needed)})."
        )
    return build(**defaults)


def default_arguments(build: Any) -> dict[str, Any]:
    """Return the required arguments of a plug-in that is given by name: a metric is the validation loss."""
    return {"monitor": "val_loss"} if _required(build) == ["monitor"] else {}


def _required(build: Any) -> list[str]:
    """Return the names of the arguments that a plug-in requires."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(build).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind in plain]


def merged_callbacks(callbacks: Sequence[Callback], module_callbacks: list[Callback]) -> list[Callback]:
    """Return the Trainer's callbacks and the module's, which replace those of the same class."""
    kinds = {type(callback) for callback in module_callbacks}
    merged = [callback for callback in callbacks if type(callback) not in kinds] + module_callbacks
    check_callbacks(merged)
    return merged
