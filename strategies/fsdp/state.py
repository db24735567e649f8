"""Canonical state of sharded modules and optimizers, and the conversion of single tensors.

A box is the part of a full tensor that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ...framework.checkpoint.stored_tensor import StoredTensors
from ...framework.checkpoint.write_plan import Shard
from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import CanonicalState, Slots, is_stored, torch_state_dict
from ...framework.parallel.parameter_names import state_tensors


class ShardedState(CanonicalState):
    """Saves and loads this rank's shards.

    Args:
        world: the ranks.
        reshard: frees gathered parameters, so that the module holds its shards; None if it holds them always.
    """

    def __init__(self, world: World, reshard: Callable[[], None] | None = None) -> None:
        self._world = world
        self._reshard = reshard

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's shards of the parameters, and on rank 0 the buffers."""
        if self._reshard is not None:
            self._reshard()
        return {
            name: shard_of(tensor)
            for name, tensor in state_tensors(module).items()
            # Buffers may differ between ranks; those of one rank are consistent with each other.
            if isinstance(tensor, DTensor) or self._world.rank == 0
        }

    @torch.no_grad()
    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Read this rank's shard of each parameter, and the buffers."""
        if self._reshard is not None:
            self._reshard()
        own = state_tensors(module)
        for name, stored in tensors.items():
            tensor = own[name]
            if isinstance(tensor, DTensor):
                shape, offsets = box_of(tensor)
                local_of(tensor).copy_(stored.read_slice(offsets, shape))
            else:
                tensor.copy_(stored.read())

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each parameter that has state, and this rank's shards of it."""
        for parameter in parameters_of(optimizer):
            slots = optimizer.state.get(parameter)
            if slots:
                yield parameter, slots_as_shards(slots)

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Read this rank's shard of every slot. Collective."""
        own = [
            {slot: slot_from_store(parameter, value) for slot, value in slots.items()}
            for parameter, slots in zip(parameters_of(optimizer), state, strict=True)
        ]
        optimizer.load_state_dict(torch_state_dict(optimizer, own, groups))


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offsets of this rank's box of the full tensor."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # The offset of a rank without any row is beyond the end.
    return tuple(shape), tuple(min(offset, size) for offset, size in zip(offsets, tensor.shape, strict=True))


def whole_of_parts(tensor: Tensor) -> Tensor:
    """Return a full tensor, gathered if it is sharded. Collective."""
    whole: Tensor = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def shard_of(tensor: Tensor) -> Shard:
    """Return this rank's part of a tensor as a shard for a checkpoint, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return Shard.whole(tensor.detach())
    shape, offsets = box_of(tensor)
    return Shard(tensor._local_tensor.detach().view(shape), tuple(tensor.shape), offsets)


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """Return a tensor with the full shape and sharding of a parameter, of which this rank holds ``local``."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def box_in(whole: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return the box of ``shape`` at ``offsets``, a view."""
    for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def slots_as_shards(slots: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state with tensors of at least one dim as shards."""
    return {
        slot: shard_of(value) if isinstance(value, Tensor) and value.dim() > 0 else _plain(value)
        for slot, value in slots.items()
    }


def _plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def slot_from_store(parameter: Tensor, stored: Any) -> Any:
    """Return a slot's value for a parameter; of a stored tensor this rank reads only its box."""
    if not is_stored(stored):
        return stored
    if not isinstance(parameter, DTensor):
        return stored.read()
    if tuple(stored.shape) == tuple(parameter.shape):
        shape, offsets = box_of(parameter)
        local = stored.read_slice(offsets, shape).to(local_of(parameter).device, copy=True)
        return like(parameter, local)
    whole = stored.read().to(local_of(parameter).device)
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def shard_slots(optimizer: Optimizer, old: Tensor, new: nn.Parameter) -> None:
    """Shard an optimizer's state of a parameter like the parameter.

    Raises:
        ConfigurationError: a slot has neither the parameter's shape nor a single element.
    """
    slots = optimizer.state.pop(old, None)
    if not slots:
        return
    assert isinstance(new, DTensor)
    shape, offsets = box_of(new)
    split: dict[str, Any] = {}
    for slot, value in slots.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != new.shape:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has stepped already, and its state {slot!r} of shape "
                    f"{list(value.shape)} cannot be split like its parameter of shape {list(new.shape)}: pass an "
                    "optimizer that has not stepped."
                )
            local = box_in(value, shape, offsets).to(local_of(new).device, copy=True)
            value = like(new, local)
        split[slot] = value
    optimizer.state[new] = split
