"""Units of a model: the submodules that are gathered and freed together, or whose activations are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from ...framework.core.errors import ConfigurationError, is_count
from ...framework.parallel.activation_memory import recomputed
from ...framework.parallel.blocks import has_forward, has_parameters, repeated_blocks, replace_method
from .initial import Source

# torch runs no compiled code within a compiled backward pass, so other tensors would be recomputed than were saved.
NO_RECOMPUTATION = (
    "recomputes activations with activation_checkpointing, which compiled code does not allow: leave one of them out, "
    "or call torch.utils.checkpoint inside the blocks"
)
Units: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | int | Callable[[nn.Module], bool] | None"
Checkpointed: TypeAlias = "bool | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]"


def check_units(units: Any) -> None:
    """Check the argument ``units``, as far as possible without a model.

    Raises:
        ConfigurationError: ``units`` is not a class, a tuple of classes, a number of parameters, a function or None.
    """
    if not (units is None or is_count(units, 1) or _chooses_modules(units)):
        raise ConfigurationError(
            f"FSDPStrategy(units={units!r}): give a class of modules, a tuple of classes, the least number of "
            "parameters of a unit (at least 1), a function from a module to a bool, or None, which finds the repeated "
            "blocks."
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
        ConfigurationError: a parameter has no dims, is trained without elements, is complex, is quantized by
            bitsandbytes, or has an unknown shape.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"{name} belongs to a lazy layer whose shape is not known yet: run a batch through the model first, or "
                "give the layer its input size."
            )
        if getattr(parameter, "quant_state", None) is not None:
            raise ConfigurationError(
                f"{name} is quantized by bitsandbytes, which keeps its scales outside of the tensor, and fsdp splits "
                "tensors: quantize the base by phalanx.hf.quantize_4bit instead, or use strategy='ddp'."
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
    return [unit for unit in units if own[unit]], left, shared


def leave_to_root(root: Any, shared: list[nn.Parameter], sources: list[Source]) -> None:
    """Assign parameters that several units share to the outermost module, as none of the units gathers them.

    torch assigns only those to it that also have a place outside of units.
    """
    if not shared:
        return
    root.shared = held = nn.ParameterList(shared)
    numbers = {id(parameter): str(number) for number, parameter in enumerate(shared)}
    for source in sources:
        if id(source.now) in numbers:
            source.owners.append((held, numbers[id(source.now)]))


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


def _chooses_modules(given: Any) -> bool:
    """Whether an argument is a class of modules, a tuple of classes or a function."""
    classes = given if isinstance(given, tuple) else (given,)
    if classes and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        return True
    return callable(given) and not isinstance(given, type)


def _shown(units: Units) -> str:
    classes = units if isinstance(units, tuple) else (units,)
    return ", ".join(getattr(each, "__name__", repr(each)) for each in classes)


# ---- units by dtype ------------------------------------------------------------------------------------------------


def modules_of_other_dtypes(module: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that must be units of their own, so that each unit trains parameters of one dtype.

    Raises:
        ConfigurationError: a module holds parameters of several dtypes, or other modules besides.
    """
    trained = {each.dtype for each in module.parameters() if each.requires_grad}
    if len(trained) < 2:
        return []
    names = {part: name for name, part in module.named_modules()}
    found: list[nn.Module] = []
    for unit in (module, *units):
        held = [(part, _dtypes(part.parameters(recurse=False))) for part in _inside(unit, set(units))]
        sizes = sum((sizes for _, sizes in held), Counter[torch.dtype]())
        if len(sizes) < 2:
            continue
        most = max(sizes, key=lambda dtype: sizes[dtype])
        for part, own in held:
            if not own or set(own) == {most}:
                continue
            if part is unit or len(own) > 1 or not has_forward(part) or any(True for _ in part.children()):
                raise ConfigurationError(
                    f"{names[part] or type(part).__name__} ({type(part).__name__}) trains parameters of the dtypes "
                    f"{', '.join(sorted(str(each).removeprefix('torch.') for each in sizes))} in one unit, which are "
                    "gathered together: put those of each dtype into a submodule of their own that is called, give "
                    "them one dtype, or use strategy='ddp'."
                )
            found.append(part)
    return found


def _dtypes(parameters: Iterable[nn.Parameter]) -> Counter[torch.dtype]:
    """Return the number of trained elements of each dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    return sizes


def _inside(part: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and its submodules, without those of other units."""
    yield part
    for child in part.children():
        if child not in units:
            yield from _inside(child, units)


# ---- recomputed activations ----------------------------------------------------------------------------------------


def check_checkpointing(given: Any) -> None:
    """Check the argument for activation checkpointing, as far as possible without a model.

    Raises:
        ConfigurationError: the argument is not a bool, a class, a tuple of classes or a function.
    """
    if not (isinstance(given, bool) or _chooses_modules(given)):
        raise ConfigurationError(
            f"activation_checkpointing={given!r}: give True for every unit, a class of modules, a tuple of classes, or "
            "a function from a module to a bool."
        )


def checkpointed_parts(module: nn.Module, units: list[nn.Module], given: Checkpointed) -> list[nn.Module]:
    """Return the submodules whose activations are recomputed in backward.

    Raises:
        ConfigurationError: checkpointing was requested and no submodule matches.
    """
    if given is False:
        return []
    if given is True:
        found = units
    elif isinstance(given, type | tuple):
        found = [part for part in module.modules() if part is not module and isinstance(part, given)]
    else:
        found = [part for part in module.modules() if part is not module and given(part)]
    if not found:
        what = "every unit" if given is True else getattr(given, "__name__", given)
        raise ConfigurationError(
            f"activation_checkpointing asks for {what}, but {type(module).__name__} has no such submodule. It is made "
            f"of these classes: {', '.join(sorted({type(each).__name__ for each in module.children()})) or 'none'}."
        )
    return found


def checkpoint_forward(part: nn.Module) -> Callable[[], None]:
    """Make a module save only its inputs for backward, without a wrapper, so that names do not change.

    Returns:
        A function that reverts this.
    """
    return replace_method(part, "forward", recomputed(part.forward))
