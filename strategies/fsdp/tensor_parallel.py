"""Tensor parallelism combined with sharding: the module's plan, tied parameters, and checks of the ranks' results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import is_parametrized

from ...framework.api.train_module import TrainModule
from ...framework.core.errors import ConfigurationError
from ...framework.core.wording import a_type
from ...framework.parallel.meta_device import Owner
from ...framework.parallel.tensor_plan import check_own_plan, has_own_plan, named_style, own_plan
from .full_semantics import FullSemantics
from .local_shards import local_of

_HOOK = "configure_tensor_parallel"
_SPLIT = nn.Linear, nn.Embedding


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
            f"parallel={{'tp': {degree}}} needs {type(module).__name__}.{_HOOK}(mesh), which defines how layers are "
            "split over the ranks of a group, or a model of transformers with a tp_plan: define it, or leave tp out."
        )


def _has_hook(module: nn.Module) -> bool:
    hook = getattr(type(module), _HOOK, None)
    return hook is not None and hook is not TrainModule.configure_tensor_parallel


def split_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a module according to its plan, or that of its models. Collective.

    Raises:
        ConfigurationError: the module returned something other than a plan.
    """
    before = {number for table in _hooks(module) for number in table[1]}
    plan: Any = getattr(module, _HOOK)(mesh) if _has_hook(module) else own_plan(module)
    if plan is not None and not isinstance(plan, dict):
        raise ConfigurationError(
            f"{type(module).__name__}.{_HOOK} returned {a_type(plan)}: return a dict of names of submodules "
            "and their ParallelStyle, or None after calling parallelize_module yourself."
        )
    if plan is not None:
        if _has_hook(module):
            plan = {name: _checked_style(module, name, style) for name, style in plan.items()}
        parallelize_module(module, mesh, plan)
    for part, table in _hooks(module):
        table.update({number: _only_of(part, hook) for number, hook in table.items() if number not in before})


def _checked_style(module: nn.Module, pattern: str, style: Any) -> Any:
    """Return the style of a name in a plan of the user's.

    Raises:
        ConfigurationError: it is not known, or a layer that has the name cannot be split.
    """
    owner = f"{type(module).__name__}.{_HOOK}"
    parts = module.named_modules(remove_duplicate=False) if isinstance(style, ColwiseParallel | RowwiseParallel) else ()
    for name, part in parts:
        if not _fits(name, pattern):
            continue
        if not isinstance(part, _SPLIT):
            inside = [each for each, inner in part.named_modules() if isinstance(inner, _SPLIT)]
            way = f"name the one inside, {name}.{inside[0]}" if inside else "leave it out"
            raise ConfigurationError(
                f"{owner} splits {name} by {type(style).__name__}, which splits nn.Linear and nn.Embedding, and it is "
                f"{a_type(part)}: {way}."
            )
        if is_parametrized(part) or "weight" not in part._parameters:
            raise ConfigurationError(
                f"{owner} splits {name}, whose weight is computed from other tensors, as by weight_norm or pruning, "
                "which are not split: leave the layer out of the plan."
            )
    return named_style(style) if isinstance(style, str) else style


def _fits(name: str, pattern: str) -> bool:
    """Whether a plan's name is that of a submodule, as torch compares them: ``*`` does not stand for a dot."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


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
            f"{name} is one parameter in several places, which {_HOOK} splits differently: {ways}. Split it the same "
            "way everywhere, or untie it."
        )
    return first


def _split(parameter: Tensor) -> Any:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def _shown(parameter: Tensor) -> str:
    return f"as {parameter.placements}" if isinstance(parameter, DTensor) else "not at all"


class EqualResults:
    """Checks that ranks which split layers have equal losses, and equal gradients of the parameters that are not split.

    A parameter that a rank applies to its own part of the features, such as the norm of attention heads, has a part of
    its gradient on each of them, which torch leaves as it is: the copies would drift apart. A loss of such a part, as a
    penalty on activations, is that of the part. The first updates are checked, and later some.

    Args:
        module: the split module.
        mesh: the ranks that split layers.
    """

    _FIRST, _EVERY = 3, 64

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module, self._mesh, self._updates = module, mesh, 0

    @torch.no_grad()
    def check_loss(self, loss: Tensor) -> None:
        """Compare a loss, before its backward pass. Collective.

        Raises:
            ConfigurationError: the losses differ.
        """
        if self._is_left_out(self._updates + 1):
            return
        narrow = loss.dtype not in (torch.float32, torch.float64)
        if not all(self._agree(loss.detach().double().view(1, 1), 1e-2 if narrow else 2e-5)):
            raise ConfigurationError(
                "the loss differs between ranks that split layers (tp): it depends on features of which each has a "
                f"part, between the layers that {_HOOK} splits, or on the rank. Compute such terms from full features, "
                "those after RowwiseParallel, and draw random numbers from torch's generator."
            )

    @torch.no_grad()
    def check_gradients(self, *_: Any) -> None:
        """Compare the gradients before an update. Collective.

        Raises:
            ConfigurationError: those of a parameter differ.
        """
        self._updates += 1
        if self._is_left_out(self._updates):
            return
        named = [(name, each) for name, each in self._module.named_parameters() if not each.is_meta and _is_whole(each)]
        if not named:
            return
        with FullSemantics.off():
            agree = self._agree(torch.stack([_digest(each) for _, each in named]), 1e-3)
        if not all(agree):
            name = named[agree.index(False)][0]
            raise ConfigurationError(
                f"the gradient of {name} differs between ranks that split layers (tp), each of which applies it to its "
                f"own part of the features: give its layer the style 'replicated_with_grad_allreduce' in {_HOOK}, "
                "which adds the gradients up, or split it."
            )

    def _is_left_out(self, update: int) -> bool:
        return update > self._FIRST and update % self._EVERY != 0

    def _agree(self, numbers: Tensor, bound: float) -> list[bool]:
        """Return for each row whether it is equal on the ranks, up to a part of its largest number. Collective."""
        both = torch.cat([numbers, -numbers])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.get_group())
        high, low = both[: len(numbers)], -both[len(numbers) :]
        # Gradients that would be zero without rounding differ by it.
        limit = bound * torch.maximum(high.abs(), low.abs()).amax(1) + 1e-8 * high.abs().max()
        # Numbers that are not finite agree.
        agree: list[bool] = (~((high - low).amax(1) > limit)).tolist()
        return agree


def _is_whole(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return not any(name == "tensor" and each.is_shard() for name, each in zip(names, parameter.placements, strict=True))


def _digest(parameter: Tensor) -> Tensor:
    """Return two numbers of this rank's part of a gradient, zeros without one."""
    gradient = parameter.grad
    part = torch.zeros(1) if gradient is None else local_of(gradient).detach()
    part = part.double() if part.numel() else part.new_zeros(1, dtype=torch.float64)
    return torch.stack([part.norm(), part.flatten()[0]]).to(local_of(parameter).device)
