"""Expert parallelism: mixture-of-experts layers whose experts are divided among ranks.

A layer of experts has parameters that are stacked by expert in dim 0, ``[experts, ...]``, and is called as
``layer(hidden, index, weights)``: tokens [tokens, width], the numbers of their experts and the weights of these
[tokens, top_k]. It returns the weighted sums, [tokens, width]. Each rank of a group keeps some of the experts, which
``fully_shard`` shards over the ranks that have the same ones.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import gcd
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...framework.api.train_module import TrainModule
from ...framework.core.degrees import Layout, divisors
from ...framework.core.errors import ConfigurationError, closest_or_known
from ...framework.core.wording import a_type
from ...framework.distributed.world import World
from ...framework.parallel.blocks import ReplacedForward, replace_method
from .dispatch import Dispatch, Sending
from .local_shards import local_of

_HOOK = "configure_expert_parallel"
# Attributes that transformers gives to layers of experts with its interface.
_MARKS = ("_apply_gate", "has_gate", "is_transposed")
# Names of a number of all experts, such as `num_experts`, `n_routed_experts` and `expert_count`. Attributes with other
# names may have the same value by chance, such as `expert_dim` and `num_experts_per_tok`.
_COUNT = re.compile(
    r"_*(?:(?:num|n|number|of|total|all|moe|local|routed)_)*(?:experts|experts?_(?:count|num|number|total))_*"
)


@dataclass(frozen=True)
class ExpertMeshes:
    """The ranks that hold different experts, and those that share or replicate the same ones."""

    group: DeviceMesh
    data: DeviceMesh
    sending: Sending = field(default_factory=Sending)

    @classmethod
    def build(cls, layout: Layout, world: World) -> ExpertMeshes | None:
        """Return the meshes of a layout; None without expert parallelism. Collective.

        Ranks of a group are next to one another, except for those that share layers, which each have a group.
        """
        if layout.ep == 1:
            return None
        names = ("replicate", "shard", "expert", "tensor")
        sizes = (layout.dp_replicate, layout.dp_shard * layout.cp // layout.ep, layout.ep, layout.tp)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
        return cls(mesh["expert"], mesh["replicate", "shard"] if layout.dp_replicate > 1 else mesh["shard"])


# ---- the layers of a module ---------------------------------------------------------------------------------------


def check_experts(module: nn.Module, degree: int) -> None:
    """Check that a module has layers of experts which a degree divides.

    A module whose layers ``configure_model`` builds is checked when it is set up.

    Raises:
        ConfigurationError: there is no such layer, or it cannot be divided.
    """
    try:
        found = _found(module, degree)
    except ConfigurationError:
        if isinstance(module, TrainModule) and type(module).configure_model is not TrainModule.configure_model:
            return
        raise
    _check_layers(module, found, degree)


def expert_layers(module: nn.Module, degree: int) -> dict[str, nn.Module]:
    """Return the layers of experts by name: those that a module names, or those of its models of transformers.

    Raises:
        ConfigurationError: there is no such layer, or the degree does not divide one.
    """
    found = _found(module, degree)
    _check_layers(module, found, degree)
    return found


def _found(module: nn.Module, degree: int) -> dict[str, nn.Module]:
    found = _named(module) if _has_hook(module) else {name: part for name, part in _parts(module) if _is_known(part)}
    if not found:
        raise ConfigurationError(
            f"parallel={{'ep': {degree}}} needs layers of experts, and {type(module).__name__} has none that is known: "
            f"define {_HOOK}(), which returns their names, or leave ep out. Known without it are those of models of "
            "transformers."
        )
    return found


def _check_layers(module: nn.Module, found: dict[str, nn.Module], degree: int) -> None:
    for name, part in found.items():
        _check_arguments(name, part)
    sizes = {name: _experts_of(name, part, degree) for name, part in found.items()}
    odd = [f"{name} has {size} experts" for name, size in sizes.items() if size % degree]
    if odd:
        raise ConfigurationError(
            f"parallel={{'ep': {degree}}} does not divide {type(module).__name__}, whose {odd[0]}. Use ep out of "
            f"{divisors(gcd(*sizes.values()))}."
        )
    _check_untied(module, found)


def _has_hook(module: nn.Module) -> bool:
    hook = getattr(type(module), _HOOK, None)
    return hook is not None and hook is not TrainModule.configure_expert_parallel


def _named(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that the module's own method names."""
    hook = f"{type(module).__name__}.{_HOOK}"
    given: Any = getattr(module, _HOOK)()
    if isinstance(given, str | nn.Module) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{hook} returned {a_type(given)}: return a list of names of submodules, or of them.")
    parts, found = dict(_parts(module)), dict[str, nn.Module]()
    for each in given:
        if isinstance(each, str):
            matches = {name: part for name, part in parts.items() if fnmatchcase(name, each)}
        else:
            matches = {name: part for name, part in parts.items() if part is each}
        if not matches:
            hint = closest_or_known(each, parts) if isinstance(each, str) else ""
            what = repr(each) if isinstance(each, str) else a_type(each)
            raise ConfigurationError(f"{hook} returned {what}, which is not a submodule of the module.{hint}")
        found |= matches
    return found


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, part) for name, part in module.named_modules() if name)


def _is_known(part: nn.Module) -> bool:
    own = next(part.parameters(False), None) is not None
    return own and type(part).__name__.endswith("Experts") and all(hasattr(part, mark) for mark in _MARKS)


def _check_arguments(name: str, part: nn.Module) -> None:
    """Refuse a layer that cannot be called with tokens, the numbers of their experts and their weights."""
    parameters = inspect.signature(part.forward).parameters.values()
    if len(parameters) < 3 and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        given = ", ".join(each.name for each in parameters) or "no arguments"
        raise ConfigurationError(
            f"{name} ({type(part).__name__}) takes {given}, and parallel={{'ep': ...}} divides layers that are called "
            "with tokens, the numbers of their experts and the weights of these: name the layer of experts inside of "
            "it, without the router."
        )


def _experts_of(name: str, part: nn.Module, degree: int) -> int:
    """Return the number of experts of a layer, the size of dim 0 of all its parameters."""
    held = {key: tuple(each.shape) for key, each in part.named_parameters()}
    sizes = [shape[0] if shape else 0 for shape in held.values()]
    count = max(sizes, key=sizes.count, default=0)
    odd = next((key for key, shape in held.items() if shape[:1] != (count,)), None)
    if not count or odd is not None:
        what = f"{name}.{odd} has the shape {list(held[odd])}" if odd else f"{name} has no parameters"
        raise ConfigurationError(
            f"parallel={{'ep': {degree}}} divides the experts of {name} ({type(part).__name__}), whose parameters must "
            f"all be stacked by expert, [experts, ...]: {what}{f' beside {count} experts' if odd else ''}. Move it out "
            "of the layer, or name the layer inside that has them."
        )
    for key, buffer in part.named_buffers():
        if buffer.shape[:1] == (count,):
            raise ConfigurationError(
                f"parallel={{'ep': {degree}}} divides the {count} experts of {name}, but not its buffer {key} of shape "
                f"{list(buffer.shape)}: move it out of the layer, next to the router."
            )
    return count


def _check_untied(module: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Refuse parameters that a layer of experts shares with another module, and layers inside of one another."""
    owners: dict[int, set[str]] = {}
    inside = {id(sub): name for name, part in layers.items() for sub in part.modules()}
    for name, part in module.named_modules():
        for held in part._parameters.values():
            if held is not None:
                owners.setdefault(id(held), set()).add(inside.get(id(part), name))
    for name, part in layers.items():
        for key, held in part.named_parameters():
            others = owners[id(held)] - {name}
            if others:
                raise ConfigurationError(
                    f"{name}.{key} is a parameter of {min(others)!r} too, and parallel={{'ep': ...}} divides it: untie "
                    "it, and name no layer inside of another one."
                )


# ---- dividing them ------------------------------------------------------------------------------------------------


def divide(layers: Iterable[nn.Module], meshes: ExpertMeshes) -> list[Callable[[], None]]:
    """Divide the parameters of layers, which are on the meta device, and their computation; return the reversals."""
    undos = []
    for layer in layers:
        count = next(layer.parameters()).shape[0]
        for part in layer.modules():
            for key, held in part._parameters.items():
                if isinstance(held, DTensor):
                    raise ConfigurationError(
                        f"{type(layer).__name__}.{key} is split by configure_tensor_parallel, and by expert: leave the "
                        "layers of experts out of the former."
                    )
                if held is not None:
                    split = distribute_tensor(held.detach(), meshes.group, [Shard(0)])
                    part._parameters[key] = nn.Parameter(split, requires_grad=held.requires_grad)
        experts = LocalExperts(layer, count, count // meshes.group.size())
        run = Dispatch(meshes.group.get_group(), experts.count, experts, meshes.sending)
        checked = partial(_checked, type(layer).__name__, inspect.signature(layer.forward), run)
        undos.append(replace_method(layer, "forward", ReplacedForward(layer, checked)))
    return undos


def shard_placement(parameter: Tensor, ranks: int) -> Shard:
    """Return how ``fully_shard`` splits a rank's experts: by expert, or along a dim that the ranks divide."""
    even = [dim for dim, size in enumerate(local_of(parameter).shape) if size % ranks == 0]
    return Shard(even[0] if even else 0)


def _checked(name: str, signature: inspect.Signature, run: Dispatch, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer of experts, after a check of its arguments.

    Raises:
        ConfigurationError: they are not the tokens, the numbers of their experts and their weights.
    """
    bound = signature.bind(*args, **kwargs)
    given = [each for each in (*bound.args, *bound.kwargs.values()) if each is not None]
    shapes = [list(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in given]
    fits = len(given) == 3 and all(isinstance(each, Tensor) and each.dim() == 2 for each in given)
    if not fits or shapes[1] != shapes[2] or shapes[0][:1] != shapes[1][:1] or given[1].is_floating_point():
        raise ConfigurationError(
            f"{name} was called with {', '.join(map(str, shapes))}: under parallel={{'ep': ...}} a "
            "layer of experts takes tokens [tokens, width], the numbers of their experts and the weights of these, "
            "both [tokens, top_k]."
        )
    hidden, index, weights = given
    return run(hidden, index, weights)


class LocalExperts:
    """A layer's own forward pass over this rank's experts.

    Meanwhile its parameters are this rank's, and so is the number of experts in attributes that are named as one.

    Args:
        layer: the layer, whose parameters are divided.
        total: the number of all experts.
        count: the number of those of this rank.
    """

    def __init__(self, layer: nn.Module, total: int, count: int) -> None:
        self.count = count
        self._layer, self._forward = layer, layer.forward
        numbers = [name for name, value in vars(layer).items() if type(value) is int and value == total]
        self._numbers = [name for name in numbers if _COUNT.fullmatch(name)]

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs of rows, which have one expert each."""
        with self._as_own():
            output: Tensor = self._forward(hidden, index, weights)
        return output

    @contextmanager
    def _as_own(self) -> Iterator[None]:
        undos = [replace_method(self._layer, name, self.count) for name in self._numbers]  # type: ignore[arg-type]
        tables: list[dict[str, Any]] = [part._parameters for part in self._layer.modules()]
        gathered = [(table, key, held) for table in tables for key, held in table.items() if isinstance(held, DTensor)]
        try:
            for table, key, held in gathered:
                table[key] = held.to_local()
            yield
        finally:
            for table, key, held in gathered:
                table[key] = held
            for undo in undos:
                undo()
