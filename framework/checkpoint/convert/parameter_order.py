"""Names for the positions of an optimizer's state: torch saves it by position, a checkpoint of phalanx by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.errors import CheckpointError, ConfigurationError
from ...core.optimizer_config import resolve_optimizers
from ...core.split_optimizer import kind_of
from ...core.torch_internals import without_wrappers
from ...core.wording import a_type
from .foreign_state import ForeignOptimizer, Group, SlotState

_ASK = "pass module= (and where it has no configure_optimizers, optimizers=) so that names come from the optimizer"
# Slots that hold something other than one value for each element.
_UNSHAPED = ("step",)


@dataclass
class Order:
    """Names of an optimizer's parameters, group by group, and its class."""

    groups: list[list[str]]
    kind: str


def build_module(given: Any, hparams: Mapping[str, Any]) -> nn.Module | None:
    """Return the module that ``module=`` stands for; a class is built from the hyperparameters.

    Raises:
        ConfigurationError: it is neither a module nor a class that can be built.
    """
    if given is None or isinstance(given, nn.Module):
        return given
    if not (inspect.isclass(given) and issubclass(given, nn.Module)):
        raise ConfigurationError(f"module={given!r} is not a module; give an nn.Module, or a TrainModule class.")
    try:
        module: nn.Module = given(**_accepted(given, hparams))
    except TypeError as error:
        raise ConfigurationError(
            f"module={given.__name__} cannot be built from the hyperparameters found ({error}); give an instance."
        ) from None
    return module


def _accepted(kind: type[nn.Module], hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that the constructor takes."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = {parameter.name for parameter in parameters}
    return {name: value for name, value in hparams.items() if every or name in known}


def orders_of(module: nn.Module | None, optimizers: Sequence[Optimizer] | None) -> list[Order] | None:
    """Return the order of each optimizer's parameters as the user's objects have it, or None without such objects.

    Raises:
        ConfigurationError: the optimizers cannot be made, or update a tensor that is not a parameter of the module.
    """
    if module is None:
        if optimizers:
            raise ConfigurationError("optimizers= was given without module=; give the module that they update.")
        return None
    if optimizers is None:
        configure = getattr(module, "configure_optimizers", None)
        if configure is None:
            return None
        # Layers that are built under the strategy have no parameters before.
        build = getattr(module, "configure_model", None)
        if build is not None:
            build()
        try:
            optimizers, _ = resolve_optimizers(configure())
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ConfigurationError(
                f"{type(module).__name__}.configure_optimizers() failed outside a fit ({error}): pass optimizers= as "
                "well, made of the module's parameters as the foreign run had them."
            ) from error
    names = {id(parameter): without_wrappers(name) for name, parameter in module.named_parameters()}
    foreign = [one for one in optimizers for group in one.param_groups for p in group["params"] if id(p) not in names]
    if foreign:
        raise ConfigurationError(
            f"optimizers= holds {a_type(foreign[0])} of what is not a parameter of {type(module).__name__}; "
            "make it of that module's parameters."
        )
    return [
        Order([[names[id(p)] for p in group["params"]] for group in one.param_groups], kind_of(one))
        for one in optimizers
    ]


def with_kinds(optimizers: list[ForeignOptimizer], orders: Sequence[Order] | None) -> list[ForeignOptimizer]:
    """Return optimizers whose state is stored by name, with the classes of the user's objects where these are known."""
    if orders is None or len(optimizers) != len(orders):
        return optimizers
    return [replace(optimizer, kind=order.kind) for optimizer, order in zip(optimizers, orders, strict=True)]


def by_name(
    states: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    orders: Sequence[Order] | None,
    ordered: bool,
    notes: list[str],
) -> list[ForeignOptimizer]:
    """Return optimizers by name from torch's ``state_dict`` of each.

    ``ordered``: whether ``weights`` are in the module's order. Without ``orders`` names are inferred where there is one
    way only.

    Raises:
        CheckpointError: the names are not certain, or do not fit.
    """
    if orders is not None and len(orders) != len(states):
        raise CheckpointError(
            f"the foreign checkpoint holds {len(states)} optimizers, module and optimizers have {len(orders)}."
        )
    named = []
    for index, state in enumerate(states):
        order = orders[index] if orders is not None else None
        names = _names_of(state, weights, order, ordered, len(states), notes)
        found: SlotState = {names[position]: dict(slots) for position, slots in state["state"].items()}
        _check_shapes(found, weights)
        groups = [
            Group(
                [names[p] for p in group["params"]],
                {k: v for k, v in group.items() if k not in ("params", "param_names")},
            )
            for group in state["param_groups"]
        ]
        named.append(ForeignOptimizer(groups, found, order.kind if order is not None else ""))
    return named


def _names_of(
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    order: Order | None,
    ordered: bool,
    num_optimizers: int,
    notes: list[str],
) -> dict[Any, str]:
    """Return the parameter's name for each position: by the module, by names in the file, or by shapes."""
    groups = [list(group["params"]) for group in state["param_groups"]]
    positions = list(chain.from_iterable(groups))
    if order is not None:
        sizes, own = [len(group) for group in groups], [len(group) for group in order.groups]
        if own != sizes:
            raise CheckpointError(
                f"the foreign optimizer has groups of {sizes} parameters, the module's {own}: pass optimizers= with "
                "the same groups."
            )
        return dict(zip(positions, chain.from_iterable(order.groups), strict=True))
    if all(isinstance(position, str) for position in positions):
        return {position: position for position in positions}
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in state["param_groups"]):
        given = chain.from_iterable(group["param_names"] for group in state["param_groups"])
        return dict(zip(positions, given, strict=True))
    if num_optimizers > 1 or len(groups) > 1:
        what = f"{num_optimizers} optimizers" if num_optimizers > 1 else f"{len(groups)} parameter groups"
        raise CheckpointError(f"the foreign checkpoint has {what} and keeps their state by position: {_ASK}.")
    names = _inferred(state, positions, weights, ordered)
    notes.append(
        "optimizer state was given to parameters in the order of the module, which is where their shapes fit; if "
        "configure_optimizers orders them otherwise, convert again with module="
    )
    return names


def _check_shapes(found: SlotState, weights: Mapping[str, Tensor]) -> None:
    for name, slots in found.items():
        for slot, value in slots.items():
            if name not in weights:
                raise CheckpointError(f"the optimizer has state for {name}, which the foreign model does not hold.")
            shaped = slot not in _UNSHAPED and isinstance(value, Tensor) and value.dim() > 0
            # Adafactor and its like keep rows and columns.
            if shaped and value.numel() == weights[name].numel() and value.shape != weights[name].shape:
                raise CheckpointError(
                    f"{slot} of {name} has shape {list(value.shape)}, but the parameter {list(weights[name].shape)}: "
                    f"the optimizer orders parameters otherwise; {_ASK}."
                )


def _inferred(
    state: Mapping[str, Any], positions: list[Any], weights: Mapping[str, Tensor], ordered: bool
) -> dict[Any, str]:
    """Return the name of each position where there is one way to give them in the module's order."""
    candidates = _candidates(weights)
    wanted = [_shape(state["state"].get(position, {})) for position in positions]
    chosen = _only_embedding(wanted, candidates) if ordered else _by_shape_alone(wanted, candidates)
    if chosen is None:
        raise CheckpointError(
            f"the optimizer keeps the state of {len(positions)} parameters by position, and which of the model's "
            f"{len(candidates)} tensors they belong to is not certain: {_ASK}."
        )
    return dict(zip(positions, chosen, strict=True))


def _candidates(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of what may be parameters: tied ones once, no integers, no statistics of batch norms."""
    seen: set[tuple[int, ...]] = set()
    found = {}
    for name, tensor in weights.items():
        where = (tensor.data_ptr(), *tensor.shape)
        stem, _, last = name.rpartition(".")
        statistic = last in ("running_mean", "running_var") and f"{stem}.num_batches_tracked".lstrip(".") in weights
        if tensor.is_floating_point() and not statistic and (where not in seen or not tensor.numel()):
            seen.add(where)
            found[name] = tuple(tensor.shape)
    return found


def _shape(slots: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = {tuple(v.shape) for k, v in slots.items() if k not in _UNSHAPED and isinstance(v, Tensor) and v.dim()}
    return shapes.pop() if len(shapes) == 1 else None


def _by_shape_alone(
    wanted: list[tuple[int, ...] | None], candidates: Mapping[str, tuple[int, ...]]
) -> list[str] | None:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in candidates.items():
        by_shape.setdefault(shape, []).append(name)
    found = [by_shape.get(shape, []) if shape is not None else [] for shape in wanted]
    return [names[0] for names in found] if all(len(names) == 1 for names in found) else None


def _only_embedding(
    wanted: list[tuple[int, ...] | None], candidates: Mapping[str, tuple[int, ...]]
) -> list[str] | None:
    """Return the names of the only subsequence of shapes that equals ``wanted``; None unless there is one."""
    names, shapes = list(candidates), list(candidates.values())
    first = _greedy(wanted, shapes)
    last = _greedy(wanted[::-1], shapes[::-1])
    if first is None or last is None:
        return None
    # Where the leftmost and the rightmost way agree, there is no other.
    if first != [len(shapes) - 1 - place for place in reversed(last)]:
        return None
    return [names[place] for place in first]


def _greedy(wanted: list[tuple[int, ...] | None], shapes: list[tuple[int, ...]]) -> list[int] | None:
    places, place = [], 0
    for shape in wanted:
        while place < len(shapes) and shape is not None and shapes[place] != shape:
            place += 1
        if place == len(shapes):
            return None
        places.append(place)
        place += 1
    return places
