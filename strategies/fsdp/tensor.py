"""Tensor parallelism combined with sharding: the module's plan, and tied parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...framework.api.train_module import TrainModule
from ...framework.core.errors import ConfigurationError
from ...framework.core.wording import a_type
from ...framework.parallel.meta_device import Owner
from ...framework.parallel.tensor_plan import check_own_plan, has_own_plan, own_plan
from .tensor_checks import HOOK, checked_style


def check_plan(module: nn.Module, degree: int) -> None:
    """Check that a module defines a plan for splitting its layers, or that its models bring one along.

    A module whose layers ``configure_model`` builds is checked when it is set up.

    Raises:
        ConfigurationError: there is no plan, or it does not fit the degree.
    """
    if _has_hook(module):
        return
    if has_own_plan(module):
        check_own_plan(module, degree)
    elif next(module.parameters(), None) is not None or not isinstance(module, TrainModule):
        raise ConfigurationError(
            f"parallel={{'tp': {degree}}} needs {type(module).__name__}.{HOOK}(mesh), which defines how layers are "
            "split over the ranks of a group, or a model of transformers with a tp_plan: define it, or leave tp out."
        )


def _has_hook(module: nn.Module) -> bool:
    hook = getattr(type(module), HOOK, None)
    return hook is not None and hook is not TrainModule.configure_tensor_parallel


def split_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a module according to its plan, or that of its models. Collective.

    Raises:
        ConfigurationError: the module returned something other than a plan.
    """
    before = {number for table in _hooks(module) for number in table[1]}
    plan: Any = getattr(module, HOOK)(mesh) if _has_hook(module) else own_plan(module)
    if plan is not None and not isinstance(plan, dict):
        raise ConfigurationError(
            f"{type(module).__name__}.{HOOK} returned {a_type(plan)}: return a dict of names of submodules "
            "and their ParallelStyle, or None after calling parallelize_module yourself."
        )
    if plan is not None:
        if _has_hook(module):
            plan = {name: checked_style(module, name, style) for name, style in plan.items()}
        parallelize_module(module, mesh, plan)
    for part, table in _hooks(module):
        table.update({number: _only_of(part, hook) for number, hook in table.items() if number not in before})


def _hooks(module: nn.Module) -> Iterator[tuple[nn.Module, dict[int, Callable[..., Any]]]]:
    for part in module.modules():
        yield part, part._forward_pre_hooks
        yield part, part._forward_hooks


def _only_of(part: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing for copies of a layer, which compute with full weights."""
    own = ref(part)
    return lambda called, *args: hook(called, *args) if called is own() else None


def tie_again(name: str, owners: Iterable[Owner]) -> nn.Parameter:
    """Return the single parameter to register in all places of a tied parameter after layers were split.

    Raises:
        ConfigurationError: the places were split differently.
    """
    held = [
        (f"{type(part).__name__}.{key}", parameter)
        for part, key in owners
        if (parameter := part._parameters[key]) is not None
    ]
    first, *others = [parameter for _, parameter in held]
    if any(_split(parameter) != _split(first) for parameter in others):
        ways = ", ".join(f"{place} {_shown(parameter)}" for place, parameter in held)
        raise ConfigurationError(
            f"{name} is one parameter in several places, which {HOOK} splits differently: {ways}. Split it the same "
            "way everywhere, or untie it."
        )
    return first


def _split(parameter: Tensor) -> Any:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def _shown(parameter: Tensor) -> str:
    return f"as {parameter.placements}" if isinstance(parameter, DTensor) else "not at all"
