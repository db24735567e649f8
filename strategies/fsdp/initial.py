"""Initial weights of a sharded model: from the module that was passed, or from its initialization."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...framework.checkpoint.write_plan import part_at
from ...framework.core.errors import ConfigurationError
from ...framework.distributed.world import World
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.meta_device import Owner, check_same_parameters, owners_of
from ...framework.pretrained.peft_adapters import check_adapters_have_data
from .local_shards import like, shape_and_offsets, whole_of_parts

_RESETS = ("reset_parameters", "_reset_parameters")
# Longer lists in attributes are data, which holds no parameters.
_MOST_KEPT = 100_000


@dataclass
class Source:
    """An original parameter: the modules in which it is registered, and the optimizer groups that hold it."""

    name: str
    given: nn.Parameter
    owners: list[Owner]
    lists: list[tuple[list[Any], int]] = field(default_factory=list)

    @property
    def now(self) -> nn.Parameter:
        part, key = self.owners[0]
        parameter = part._parameters[key]
        assert parameter is not None
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Replace this parameter by another one, in modules and optimizers."""
        for part, key in self.owners:
            part._parameters[key] = parameter
        for held, position in self.lists:
            held[position] = parameter


def take_away(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Source]:
    """Replace the parameters of a module by parameters on the meta device; return the original ones."""
    owners = owners_of(module)
    places: dict[int, list[tuple[list[Any], int]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                places.setdefault(id(parameter), []).append((group["params"], position))
    sources = [
        Source(name, parameter, owners[id(parameter)], places.get(id(parameter), []))
        for name, parameter in module.named_parameters()
    ]
    for source in sources:
        given = source.given
        shape = torch.empty(given.shape, dtype=given.dtype, device="meta")
        source.put(nn.Parameter(shape, requires_grad=given.requires_grad))
    return sources


def put_shard(source: Source, whole: Tensor | None, device: torch.device, world: World) -> nn.Parameter:
    """Replace a sharded parameter on the meta device by one of which this rank holds its part of ``whole``.

    None stands for values that are loaded later.
    """
    empty = source.now
    assert isinstance(empty, DTensor)
    shape, offsets = shape_and_offsets(empty)
    if whole is None:
        local = torch.empty(shape, dtype=source.given.dtype, device=device)
    else:
        local = part_at(whole, shape, offsets)
        local = local.to(device, copy=True) if world.size > 1 else local.to(device).contiguous()
    parameter = nn.Parameter(like(empty, local), requires_grad=source.given.requires_grad)
    source.put(parameter)
    return parameter


@contextmanager
def keeping(module: nn.Module) -> Generator[None, None, None]:
    """Context in which parameters of a module are replaced: its lists, dicts and sets then hold the new ones.

    Modules keep parameters in such attributes besides those that are registered.
    """
    before = dict(module.named_parameters())
    kept = list(_containers_of_parameters(module))
    yield
    after = dict(module.named_parameters())
    new = {id(parameter): after[name] for name, parameter in before.items()}
    for held in kept:
        _renew(held, new)


def _containers_of_parameters(module: nn.Module) -> Iterator[list[Any] | dict[Any, Any] | set[Any]]:
    """Yield the containers in attributes of modules that hold parameters, also those in other containers."""
    own = set(vars(nn.Module()))
    containers = [value for part in module.modules() for key, value in vars(part).items() if key not in own]
    seen: set[int] = set()
    while containers:
        held = containers.pop()
        if id(held) in seen or not isinstance(held, list | dict | set | tuple) or len(held) > _MOST_KEPT:
            continue
        seen.add(id(held))
        contents = [*held, *(held.values() if isinstance(held, dict) else ())]
        containers += contents
        if not isinstance(held, tuple) and any(isinstance(each, nn.Parameter) for each in contents):
            yield held


def _renew(held: list[Any] | dict[Any, Any] | set[Any], new: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters in a container by the new ones, and leave everything else in its order."""

    def renewed(value: Any) -> Any:
        return new.get(id(value), value)

    if isinstance(held, list):
        held[:] = map(renewed, held)
    elif isinstance(held, set):
        contents = set(map(renewed, held))
        held.clear()
        held |= contents
    else:
        items = [(renewed(key), renewed(value)) for key, value in held.items()]
        held.clear()
        held.update(items)


class Origins:
    """Full values of parameters, one at a time, from rank 0.

    A parameter without data on rank 0 is initialized by its recipe, if it was built under the strategy, or by the
    ``reset_parameters`` of its module, which every rank runs so that the generators stay identical. One that is
    ``supplied``, loaded after set-up, has no value here.
    """

    def __init__(
        self, module: nn.Module, deferred: Deferred, world: World, supplied: Collection[str] = frozenset()
    ) -> None:
        self.module = module
        self.deferred = deferred
        self.world = world
        self.supplied = supplied
        check_same_parameters(module, world)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        later = {id(parameters[name]) for name in supplied if name in parameters}
        parameters = {name: given for name, given in parameters.items() if id(given) not in later}
        mine = {name for name, given in parameters.items() if given.is_meta and deferred.recipe(given) is None}
        # After a fit under a sharded strategy only rank 0 may hold the data.
        self.lacking: set[str] = mine & world.broadcast_object(mine)
        check_adapters_have_data(module, {id(parameters[name]) for name in self.lacking})
        for part_name, part in module.named_modules():
            names = [name for name in part._parameters if f"{part_name}.{name}".lstrip(".") in self.lacking]
            if names and _reset_of(part) is None:
                raise ConfigurationError(
                    f"{part_name or type(module).__name__} ({type(part).__name__}) owns {', '.join(names)} on the meta "
                    "device and has no reset_parameters() to give them values: define it, or build the layer in "
                    "configure_model or Fabric.init_module."
                )
        self._reset: dict[str, Tensor] = {}

    def value(self, name: str, given: nn.Parameter) -> Tensor | None:
        """Return the full value of a parameter on this rank's device; None if it is loaded later. Collective."""
        if name in self.supplied:
            return None
        world = self.world
        if name in self.lacking and name not in self._reset:
            self._reset.update(self._after_reset(name))
        if name in self._reset:
            own: Tensor | None = self._reset.pop(name)
        elif not given.is_meta:
            own = whole_of_parts(given)
        else:
            recipe = self.deferred.recipe(given) if world.rank == 0 else None
            own = None if recipe is None else recipe.value().to(given.dtype)
        if world.size == 1:
            assert own is not None
            return own
        if world.rank == 0:
            assert own is not None
            return world.broadcast(own.to(world.device).contiguous())
        return world.broadcast(torch.empty(given.shape, dtype=given.dtype, device=world.device))

    def release(self, given: nn.Parameter) -> None:
        """Free what the value of a parameter was made from."""
        if given.is_meta:
            self.deferred.forget(given)

    def _after_reset(self, name: str) -> dict[str, Tensor]:
        """Allocate and initialize the outermost layer that owns a parameter; return the values of its parameters."""
        path, part = next((path, part) for path, part in self._chunks() if name.startswith(path))
        tables = [(sub, key, value) for sub in part.modules() for key, value in sub._parameters.items()]
        fresh: dict[int, nn.Parameter] = {}
        values: dict[str, Tensor] = {}
        try:
            for sub, key, held in tables:
                if held is not None:
                    if id(held) not in fresh:
                        fresh[id(held)] = _empty(held, self.world.device)
                    sub._parameters[key] = fresh[id(held)]
            for sub in _children_first(part):
                reset = _reset_of(sub)
                if reset is not None and any(each is not None for each in sub._parameters.values()):
                    with torch.no_grad():
                        reset()
            for sub_name, parameter in part.named_parameters(remove_duplicate=False):
                full = f"{path}{sub_name}"
                if full in self.lacking:
                    values[full] = parameter.detach()
        finally:
            for sub, key, held in tables:
                sub._parameters[key] = held
        return values

    def _chunks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the outermost modules that own parameters without data, with the prefix of their names."""
        taken: list[str] = []
        for path, part in self.module.named_modules():
            prefix = f"{path}." if path else ""
            inside = any(prefix.startswith(each) for each in taken)
            if not inside and any(f"{prefix}{key}" in self.lacking for key in part._parameters):
                taken.append(prefix)
                yield prefix, part


@torch.no_grad()
def fill(sources: list[Source], origins: Origins, put: Callable[[Source, Tensor | None], Any]) -> None:
    """Replace parameters one at a time, so that at most one full value is in memory. Collective.

    Args:
        sources: the original parameters; each is removed from the list before the next one takes memory.
        origins: the values.
        put: takes a source and its value, which is None if it is loaded later, and puts the new parameter in place.
    """
    while sources:
        source = sources.pop(0)
        put(source, origins.value(source.name, source.given))
        origins.release(source.given)


def _empty(held: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(held.shape, dtype=held.dtype, device=device), requires_grad=held.requires_grad)


def _children_first(part: nn.Module) -> Iterator[nn.Module]:
    for child in part.children():
        yield from _children_first(child)
    yield part


def _reset_of(part: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(part, name) for name in _RESETS if callable(getattr(part, name, None))), None)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers that have data to a device."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[name] = buffer.to(device)


@torch.no_grad()
def allocate_buffers(
    module: nn.Module, world: World, supplied: Collection[str] = frozenset()
) -> list[tuple[str, nn.Module, list[str]]]:
    """Allocate buffers that are on the meta device; return those without data on rank 0. Collective.

    Buffers that are ``supplied``, loaded later, are not returned.

    Raises:
        ConfigurationError: an attribute is a tensor on the meta device that is not a buffer, which nothing fills.
    """
    stray = [
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if stray:
        raise ConfigurationError(
            f"{', '.join(stray)} is a tensor on the meta device that is not a buffer, so nothing gives it data: use "
            "register_buffer, or compute it in forward."
        )
    empty = {name for name, buffer in module.named_buffers() if buffer.is_meta and name not in supplied}
    lacking = empty & world.broadcast_object(empty)
    found = []
    for path, part in module.named_modules():
        for key, held in part._buffers.items():
            if held is not None and held.is_meta:
                part._buffers[key] = torch.full(held.shape, _mark(held.dtype), dtype=held.dtype, device=world.device)
        names = [key for key in part._buffers if f"{path}.{key}".lstrip(".") in lacking]
        if names:
            found.append((path, part, names))
            reset = _reset_of(part)
            if reset is not None and not any(parameter is not None for parameter in part._parameters.values()):
                reset()
            elif callable(running := getattr(part, "reset_running_stats", None)):
                running()
    return found


def check_buffers(found: list[tuple[str, nn.Module, list[str]]]) -> None:
    """Check that the initialization of the parameters has filled the buffers without data.

    Raises:
        ConfigurationError: on all ranks; a buffer was not filled.
    """
    for path, part, names in found:
        untouched = [key for key in names if _is_marked(part._buffers[key])]
        if untouched:
            raise ConfigurationError(
                f"{path} ({type(part).__name__}) owns the buffers {', '.join(untouched)} on the meta device, and "
                "nothing computes them: build the module in configure_model or Fabric.init_module, where buffers get "
                "their data, or compute them in its reset_parameters()."
            )


def _is_marked(held: Tensor | None) -> bool:
    if held is None or not held.numel():
        return False
    return bool(held.isnan().all() if held.is_floating_point() else (held == _mark(held.dtype)).all())


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
