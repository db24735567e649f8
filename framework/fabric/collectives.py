"""``Ranks``, the process group that a Fabric joins when it is first needed, and collectives on nested collections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, DataError
from ..distributed.devices import copies_in_order
from ..distributed.gather import leaves_of, map_leaves
from ..distributed.user_collectives import reduce_tensors, values_of_present
from ..distributed.world import World
from ..parallel.resources import Resources

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class Ranks:
    """The ranks of a Fabric: its process group, which is joined on first access."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._world: World | None = None

    @property
    def world(self) -> World:
        """The process group. Joined on first access, which is collective.

        Raises:
            ConfigurationError: the ranks have not been started.
        """
        if self._world is None:
            if self.resources.must_launch:
                raise ConfigurationError(
                    f"devices={self.resources.devices} asks for {self.resources.world_size} ranks, and they have not "
                    "been started: call fabric.launch() first, at the top of the script, or fabric.launch(function) "
                    "in a notebook."
                )
            self._world = self.resources.connect()
        return self._world

    def close(self) -> None:
        """Leave the process group, if it was joined."""
        if self._world is not None:
            self._world.close()


def to_device(obj: Any, device: torch.device) -> Any:
    """Move a tensor, a module or a collection of tensors to a device. Copies from pinned memory do not block."""
    from lightning_utilities.core.apply_func import apply_to_collection

    if isinstance(obj, torch.nn.Module):
        return obj.to(device)
    non_blocking = copies_in_order(device)
    return apply_to_collection(obj, Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def all_reduce(world: World, data: Any, op: str) -> Any:
    """Return tensors reduced over all ranks; see ``Fabric.all_reduce``. Collective."""
    present = values_of_present(world, "all_reduce", data)
    others = None if present is None else [iter(leaves_of(each)) for each in present.values()]

    def as_tensor(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float)):
            return torch.tensor(float(leaf) if op == "mean" else leaf, device=world.device)
        return leaf

    def reduce(leaf: Any) -> Any:
        leaf = as_tensor(leaf)
        if others is not None:
            leaves = [as_tensor(next(each)) for each in others]
            return reduce_tensors(leaves, op) if isinstance(leaf, Tensor) else leaf
        if not isinstance(leaf, Tensor):
            return leaf
        return world.all_reduce(leaf.detach().clone(), op)  # type: ignore[arg-type]

    return map_leaves(reduce, data)


def broadcast(world: World, obj: T, src: int) -> T:
    """Return the object of rank ``src``, its tensors on this rank's device. Collective."""
    from lightning_utilities.core.apply_func import apply_to_collection

    if world.size == 1:
        return obj
    if (present := values_of_present(world, "broadcast", obj if world.rank == src else None)) is not None:
        if src not in present:
            raise DataError(f"broadcast(..., src={src}) in a step for which rank {src} has no batch: broadcast before.")
        return present[src]  # type: ignore[no-any-return]
    sent = apply_to_collection(obj, Tensor, lambda tensor: tensor.detach().cpu()) if world.rank == src else obj
    moved: T = to_device(world.broadcast_object(sent, src), world.device)
    return moved


def only_when(condition: Callable[[], bool], function: Function) -> Function:
    """Return a function that does nothing and returns None where a condition does not hold."""

    # Evaluated in each call: ranks may be started between the definition and the first call.
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return wrapped  # type: ignore[return-value]
