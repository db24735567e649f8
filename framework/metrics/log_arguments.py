"""The arguments of ``log``: validation of the value and its reduction, per step or per epoch, the default weight."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, MetricError, did_you_mean
from ..core.wording import a_type
from .torchmetrics_state import is_collection

_REDUCTIONS = ("mean", "sum", "min", "max")
_EQUIVALENTS: dict[Any, str] = {"avg": "mean", torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max"}
_EQUIVALENTS |= {sum: "sum", min: "min", max: "max"}


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
        f"log({name!r}, ...) got {a_type(value)}; "
        f"a value must be a number, a tensor with one element, or a torchmetrics Metric{hint}."
    )


def batch_items(batch: Any) -> int:
    """Return how many items a batch holds: the first dim of its first tensor, else the length of its first list of
    strings, else 1."""
    if (batch.__class__ is list or batch.__class__ is tuple) and batch and batch[0].__class__ is Tensor:
        first: Tensor = batch[0]
        return first.shape[0] if first.dim() else 1
    texts: list[int] = []
    found = next(_sizes(batch, texts), None)
    return found if found is not None else texts[0] if texts else 1


def _sizes(batch: Any, texts: list[int]) -> Iterator[int]:
    """Yield the first dim of each tensor or array; note the lengths of lists of strings in ``texts``."""
    if isinstance(batch, Tensor) or (hasattr(batch, "shape") and hasattr(batch, "dtype")):
        yield batch.shape[0] if len(batch.shape) else 1
    elif isinstance(batch, (str, bytes)):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value, texts)
    elif isinstance(batch, Iterable) and not isinstance(batch, Iterator):
        items = list(batch)
        if items and isinstance(items[0], (str, bytes)):
            texts.append(len(items))
        for value in items:
            yield from _sizes(value, texts)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _sizes(getattr(batch, field.name), texts)
