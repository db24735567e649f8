"""Validation of the arguments of ``log``: the value, its reduction, and whether it is per step, per epoch or both."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, MetricError, did_you_mean
from .torchmetrics_state import is_collection

_REDUCTIONS = ("mean", "sum", "min", "max")
_EQUIVALENTS: dict[Any, str] = {
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}


def reduction_of(name: str, given: Any) -> str:
    """Return the name of the reduction that ``reduce_fx`` asks for.

    Raises:
        ConfigurationError: there is no such reduction.
    """
    fx = given.lower() if isinstance(given, str) else given
    if isinstance(fx, Hashable):
        fx = _EQUIVALENTS.get(fx, fx)
    if fx not in _REDUCTIONS:
        raise ConfigurationError(
            f"log({name!r}, reduce_fx={given!r}) is not known.{did_you_mean(str(fx), _REDUCTIONS)} "
            f"Known: {', '.join(_REDUCTIONS)}; for anything else log a torchmetrics Metric."
        )
    return str(fx)


def kept_for(
    name: str, on_step: bool | None, on_epoch: bool | None, training: bool, in_step: bool
) -> tuple[bool, bool]:
    """Return whether a value is kept for each step, and whether for the epoch, with the defaults filled in.

    Args:
        name: the logged name.
        on_step: as given to ``log``; None for the default, which is True in a training step only.
        on_epoch: as given to ``log``; None for the default, which is False in a training step only.
        training: whether the stage is ``"train"``.
        in_step: whether a step is running, not a hook of the epoch.

    Raises:
        ConfigurationError: a hook of the epoch has no step, or the value would be kept for neither.
    """
    stepwise = training and in_step
    on_step = stepwise if on_step is None else on_step
    on_epoch = not stepwise if on_epoch is None else on_epoch
    if on_step and not in_step:
        raise ConfigurationError(f"log({name!r}, on_step=True) in a hook of the epoch: use on_epoch=True there.")
    if not on_step and not on_epoch:
        raise ConfigurationError(f"log({name!r}, ...) with on_step and on_epoch both False records nothing.")
    return bool(on_step), bool(on_epoch)


def not_one_element(name: str, value: Tensor) -> MetricError:
    """Return the error for a tensor that has not exactly one element."""
    return MetricError(
        f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; a value must have one element: "
        "reduce it first, with .mean() for example."
    )


def number_of(name: str, value: Any) -> float:
    """Return a logged value as a float.

    Raises:
        MetricError: it is not one number.
    """
    if isinstance(value, Tensor):
        try:
            value = value.item()
        except RuntimeError:
            raise not_one_element(name, value) from None
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    hint = "; log a MetricCollection with log_dict" if is_collection(value) else ""
    raise MetricError(
        f"log({name!r}, ...) got a {type(value).__name__}; "
        f"a value must be a number, a tensor with one element, or a torchmetrics Metric{hint}."
    )
