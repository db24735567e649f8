"""Optimizer state in tensor subclasses of several plain tensors: the quantized state of torchao's optimizers.

A checkpoint holds each of the plain tensors in a slot of its own, such as ``exp_avg.codes``, and under ``exp_avg`` a
description from which the subclass is built again. Only the classes listed here are built, whatever a file names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .errors import CheckpointError
from .split_optimizer import optimizers_in

_CLASSES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_OPTIMIZERS = {"Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8"}
LOOKUP = "qmap"
"""The part that has the same values for every element: a table from codes to numbers."""


def quantizes(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state is quantized, as far as its parameters are large enough."""
    kinds = {kind.__name__ for part in optimizers_in(optimizer) for kind in type(part).__mro__}
    return not _OPTIMIZERS.isdisjoint(kinds)


def is_quantized(value: Any) -> bool:
    """Whether a slot's value is a tensor subclass of several plain tensors."""
    return isinstance(value, Tensor) and type(value).__name__ in _CLASSES


def parts_of(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors of a subclass by name, sharing their memory."""
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def description_of(value: Any, shape: Sequence[int]) -> dict[str, Any]:
    """Return class and attributes of a subclass, plain values, as those of a tensor of ``shape``."""
    _, attributes = value.__tensor_flatten__()
    return {"class": type(value).__name__, "attributes": _with_shape(attributes, shape)}


def rebuild(description: Mapping[str, Any], parts: Mapping[str, Tensor], shape: Sequence[int] | None) -> Any:
    """Return the subclass that a description and the plain tensors give, of ``shape`` or of the described one.

    Raises:
        CheckpointError: they do not describe one.
    """
    name = description["class"]
    kind = getattr(import_module(_CLASSES[name]), name)
    try:
        return kind.__tensor_unflatten__(dict(parts), _with_shape(description["attributes"], shape))
    except (AssertionError, AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"the optimizer's state is described as {name} with the tensors {', '.join(parts) or 'none'}, from which "
            f"none can be built ({type(error).__name__}: {error}): resume from another checkpoint."
        ) from error


def split_slots(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state with subclasses replaced by their descriptions and plain tensors."""
    split: dict[str, Any] = {}
    for slot, value in slots.items():
        if is_quantized(value):
            split[slot] = description_of(value, value.shape)
            split |= {f"{slot}.{name}": part for name, part in parts_of(value).items()}
        else:
            split[slot] = value
    return split


def grouped(slots: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the slots of ``split_slots`` without those of subclasses, and the parts of each subclass by slot."""
    described = [slot for slot, value in slots.items() if _is_description(value)]
    parts: dict[str, dict[str, Any]] = {slot: {} for slot in described}
    plain: dict[str, Any] = {}
    for slot, value in slots.items():
        owner, _, name = slot.rpartition(".")
        if owner in parts:
            parts[owner][name] = value
        elif slot not in parts:
            plain[slot] = value
    return plain, parts


def join_slots(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Revert ``split_slots``."""
    plain, subclasses = grouped(slots)
    for slot, parts in subclasses.items():
        plain[slot] = rebuild(slots[slot], parts, None)
    return plain


def _is_description(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("class") in _CLASSES


def _with_shape(attributes: Sequence[Any], shape: Sequence[int] | None) -> list[Any]:
    return [tuple(shape) if isinstance(each, tuple) and shape is not None else each for each in attributes]
