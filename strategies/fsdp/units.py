"""Units of a model: the submodules that are gathered and freed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from ...framework.core.errors import ConfigurationError
from ...framework.parallel.blocks import has_forward, has_parameters, repeated_blocks

Units: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | int | Callable[[nn.Module], bool] | None"


def check_units(units: Any) -> None:
    """Check the argument ``units``, as far as possible without a model.

    Raises:
        ConfigurationError: ``units`` is not a class, a tuple of classes, a number of parameters, a function or None.
    """
    if units is None:
        return
    if isinstance(units, int) and not isinstance(units, bool):
        if units >= 1:
            return
    elif isinstance(units, tuple):
        if units and all(_is_module_class(each) for each in units):
            return
    elif _is_module_class(units) or (callable(units) and not isinstance(units, type | bool)):
        return
    raise ConfigurationError(
        f"FSDPStrategy(units={units!r}): give a class of modules, a tuple of classes, the least number of parameters "
        "of a unit (at least 1), a function from a module to a bool, or None, which finds the repeated blocks."
    )


def find_units(module: nn.Module, units: Units) -> list[nn.Module]:
    """Return the submodules that are units, parents before children; without any, the model is a single unit.

    Raises:
        ConfigurationError: units were requested, and no submodule matches.
    """
    if units is None:
        return list(repeated_blocks(module))
    if isinstance(units, int):
        return _of_size(module, units)
    parts = [part for part in module.modules() if part is not module and has_forward(part) and has_parameters(part)]
    found = [part for part in parts if (isinstance(part, units) if isinstance(units, type | tuple) else units(part))]
    if not found:
        known = ", ".join(sorted({type(part).__name__ for part in parts})) or "none"
        raise ConfigurationError(
            f"FSDPStrategy(units={_shown(units)}) matches no submodule of {type(module).__name__} that has parameters "
            f"and a forward. Its submodules are of these classes: {known}."
        )
    return found


def check_parameters(module: nn.Module) -> None:
    """Check that every parameter can be sharded.

    Raises:
        ConfigurationError: a parameter has no dims, is trained without elements, is complex, or has an unknown shape.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"{name} belongs to a lazy layer whose shape is not known yet: run a batch through the model first, or "
                "give the layer its input size."
            )
        if not parameter.numel() and parameter.requires_grad:
            raise ConfigurationError(
                f"{name} has no elements, so torch cannot reduce its gradient: freeze it, which changes nothing, or "
                "use strategy='ddp'."
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise ConfigurationError(
                f"{name} is complex, and torch reduces sharded gradients as real numbers: keep real and imaginary "
                "parts in a real parameter, with torch.view_as_complex in forward, or use strategy='ddp'."
            )
        if parameter.dim() == 0:
            raise ConfigurationError(
                f"{name} is a parameter without dims, which cannot be split over ranks: give it one dim, with one "
                "element, torch.zeros(1) in place of torch.tensor(0.0)."
            )


def check_renormalized(module: nn.Module) -> None:
    """Refuse embeddings that change their weights in a forward pass, where ranks have different batches.

    Raises:
        ConfigurationError: an embedding has ``max_norm``.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ConfigurationError(
                f"{name or 'the module'} has max_norm={part.max_norm}, by which each rank changes the rows of its own "
                "batch, and the ranks share one sharded weight: leave max_norm out, and limit the norms of all rows "
                "with torch.renorm in on_train_batch_start."
            )


def without_shared(
    module: nn.Module, units: list[nn.Module]
) -> tuple[list[nn.Module], dict[nn.Module, set[nn.Parameter]], list[nn.Parameter]]:
    """Return the units, the parameters that each of them leaves to the root, and all parameters left to the root.

    A parameter of several units, or of a unit and the rest of the model, is gathered with the root, which stays
    gathered during a step: a unit would free the parameter while another unit still needs it. A unit that would have
    no parameters left is removed.
    """
    wanted, owners = set(units), dict[nn.Parameter, set[nn.Module | None]]()
    _note_owners(module, None, wanted, owners, set())
    shared = [parameter for parameter, holders in owners.items() if len(holders) > 1]
    left: dict[nn.Module, set[nn.Parameter]] = {unit: set() for unit in units}
    own: dict[nn.Module, int] = dict.fromkeys(units, 0)
    for parameter, holders in owners.items():
        for unit in holders:
            if unit is not None and len(holders) > 1:
                left[unit].add(parameter)
            elif unit is not None:
                own[unit] += 1
    # torch does not assign a parameter that only units share to the root: see ``ShardedModel``.
    return [unit for unit in units if own[unit]], left, shared


def prefetch(root: Any, units: list[Any], count: int) -> None:
    """Make each unit gather the next ``count`` units while it computes, in forward and in backward."""
    if not count:
        return
    root.set_modules_to_forward_prefetch(units[:count])
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])


def _note_owners(
    part: nn.Module,
    unit: nn.Module | None,
    units: set[nn.Module],
    owners: dict[nn.Parameter, set[nn.Module | None]],
    seen: set[tuple[nn.Module, nn.Module | None]],
) -> None:
    unit = part if part in units else unit
    if (part, unit) in seen:
        return
    seen.add((part, unit))
    for parameter in part._parameters.values():
        if parameter is not None:
            owners.setdefault(parameter, set()).add(unit)
    for child in part.children():
        _note_owners(child, unit, units, owners, seen)


def _of_size(module: nn.Module, least: int) -> list[nn.Module]:
    """Return submodules of at least ``least`` parameters, not counting those of units inside them."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def free(part: nn.Module) -> int:
        if part in seen:
            return 0
        seen.add(part)
        position = len(found)
        count = sum(parameter.numel() for parameter in part._parameters.values() if parameter is not None)
        count += sum(free(child) for child in part.children())
        if part is module or count < least or not has_forward(part):
            return count
        found.insert(position, part)
        return 0

    free(module)
    return found


def _is_module_class(given: Any) -> bool:
    return isinstance(given, type) and issubclass(given, nn.Module)


def _shown(units: Units) -> str:
    classes = units if isinstance(units, tuple) else (units,)
    return ", ".join(getattr(each, "__name__", repr(each)) for each in classes)
