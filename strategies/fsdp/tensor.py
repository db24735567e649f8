"""Tensor parallelism combined with sharding: the module's plan, and tied parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...framework.api.train_module import TrainModule
from ...framework.core.errors import ConfigurationError
from ...framework.core.wording import a_type
from ...framework.parallel.meta_device import Owner

_HOOK = "configure_tensor_parallel"


def check_plan(module: nn.Module, degree: int) -> None:
    """Check that a module defines a plan for splitting its layers.

    Raises:
        ConfigurationError: the module does not define one.
    """
    hook = getattr(type(module), _HOOK, None)
    if hook is None or hook is TrainModule.configure_tensor_parallel:
        raise ConfigurationError(
            f"FSDPStrategy(tensor_parallel={degree}) needs {type(module).__name__}.{_HOOK}(mesh), which defines how "
            "layers are split over the ranks of a group: define it, or leave tensor_parallel out."
        )


def split_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a module according to its plan. Collective.

    Raises:
        ConfigurationError: the module returned something other than a plan.
    """
    plan: Any = getattr(module, _HOOK)(mesh)
    if plan is None:
        return
    if not isinstance(plan, dict):
        raise ConfigurationError(
            f"{type(module).__name__}.{_HOOK} returned {a_type(plan)}: return a dict of names of submodules "
            "and their ParallelStyle, or None after calling parallelize_module yourself."
        )
    parallelize_module(module, mesh, plan)


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
            f"{name} is one parameter in several places, which {_HOOK} splits differently: {ways}. Split it the same "
            "way everywhere, or untie it."
        )
    return first


def _split(parameter: Tensor) -> Any:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def _shown(parameter: Tensor) -> str:
    return f"as {parameter.placements}" if isinstance(parameter, DTensor) else "not at all"
