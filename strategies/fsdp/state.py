"""Canonical state of sharded modules and optimizers, and the conversion of single tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ...framework.checkpoint.reader import StoredTensors
from ...framework.checkpoint.write_plan import Shard, part_at
from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.quantized_state import grouped, is_quantized, join_slots, quantizes, split_slots
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import CanonicalState, Slots, is_stored, torch_state_dict, whole_of
from ...framework.parallel.parameter_names import state_tensors
from .full_updates import FullUpdates
from .local_shards import like, local_of, shape_and_offsets
from .quantized import quantized_from_store, quantized_shards


class ShardedState(CanonicalState):
    """Saves and loads this rank's shards.

    Args:
        reshard: frees gathered parameters, so that the module holds its shards; None if it holds them always.
        full_updates: the updates of parameters whose owner holds their optimizer state in full.
    """

    def __init__(
        self, world: World, reshard: Callable[[], None] | None = None, full_updates: Sequence[FullUpdates] = ()
    ) -> None:
        self._world = world
        self._reshard = reshard
        self._full_updates = full_updates

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's shards of the parameters, and on rank 0 the buffers."""
        if self._reshard is not None:
            self._reshard()
        return {name: shard_of(tensor) for name, tensor in state_tensors(module).items() if self._saves(tensor)}

    def _saves(self, tensor: Tensor) -> bool:
        """Whether this rank has a part of a tensor that is saved."""
        # Buffers may differ between ranks; those of one rank are consistent with each other.
        return isinstance(tensor, DTensor) or self._world.rank == 0

    @torch.no_grad()
    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Read this rank's shard of each parameter, and the buffers."""
        if self._reshard is not None:
            self._reshard()
        own = state_tensors(module)
        for name, stored in tensors.items():
            tensor = own[name]
            if tensor.is_meta:
                continue
            if isinstance(tensor, DTensor):
                shape, offsets = shape_and_offsets(tensor)
                local_of(tensor).copy_(stored.read_slice(offsets, shape))
            else:
                tensor.copy_(stored.read())

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        plain = self._plain_of_owners(optimizer)
        for position, parameter in enumerate(parameters_of(optimizer)):
            slots = optimizer.state.get(parameter)
            if slots:
                yield parameter, slots_as_shards(slots, quantizes(optimizer))
            elif position in plain:
                yield parameter, plain[position]

    def _plain_of_owners(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return the values that are not tensors with dims, by position, of parameters that other ranks own.

        Rank 0 writes them. Collective.
        """
        if not self._full_updates:
            return {}
        return self._gathered_plain(optimizer, lambda parameter: self._update_of(parameter) is not None)

    def _gathered_plain(self, optimizer: Optimizer, has_owner: Callable[[Tensor], bool]) -> dict[int, dict[str, Any]]:
        own = {
            position: {slot: value for slot, value in slots.items() if not (isinstance(value, Tensor) and value.dim())}
            for position, parameter in enumerate(parameters_of(optimizer))
            if has_owner(parameter) and (slots := optimizer.state.get(parameter))
        }
        return {position: slots for each in self._world.all_gather_object(own) for position, slots in each.items()}

    def _update_of(self, parameter: Tensor) -> FullUpdates | None:
        return next((updates for updates in self._full_updates if parameter in updates), None)

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Read this rank's shard of every slot. Collective."""
        own = []
        for parameter, slots in zip(parameters_of(optimizer), state, strict=True):
            updates = self._update_of(parameter)
            if updates is None:
                own.append(slots_from_store(parameter, slots))
            else:
                own.append({slot: whole_of(value) for slot, value in slots.items()} if updates.owns(parameter) else {})
        optimizer.load_state_dict(torch_state_dict(optimizer, own, groups))


def shard_of(tensor: Tensor) -> Shard:
    """Return this rank's part of a tensor as a shard for a checkpoint, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return Shard.whole(tensor.detach())
    shape, offsets = shape_and_offsets(tensor)
    return Shard(local_of(tensor).detach().view(shape), tuple(tensor.shape), offsets)


def slots_as_shards(slots: dict[str, Any], quantized: bool) -> dict[str, Any]:
    """Return a parameter's optimizer state with tensors of at least one dim as shards.

    ``quantized``: whether the state of ranks that hold more of the parameter may be quantized.
    """
    shards: dict[str, Any] = {}
    for slot, value in split_slots(slots).items():
        if isinstance(value, DTensor) and is_quantized(local_of(value)):
            shards |= quantized_shards(slot, value)
        elif isinstance(value, Tensor) and value.dim() > 0:
            # A rank without any row does not know the names under which the others save theirs.
            if not quantized or local_of(value).numel() or not value.numel():
                shards[slot] = shard_of(value)
        else:
            shards[slot] = value.full_tensor() if isinstance(value, DTensor) else value
    return shards


def slots_from_store(parameter: Tensor, slots: Slots) -> dict[str, Any]:
    """Return a parameter's optimizer state; of stored tensors this rank reads only its shards."""
    if parameter.is_meta:
        return {}
    if not isinstance(parameter, DTensor):
        return join_slots({slot: slot_from_store(parameter, value) for slot, value in slots.items()})
    plain, quantized = grouped(slots)
    held = {slot: slot_from_store(parameter, value) for slot, value in plain.items()}
    return held | {slot: quantized_from_store(parameter, slots[slot], parts) for slot, parts in quantized.items()}


def slot_from_store(parameter: Tensor, stored: Any) -> Any:
    """Return a slot's value for a parameter; of a stored tensor this rank reads only its shard."""
    if not is_stored(stored):
        return stored
    if not isinstance(parameter, DTensor):
        return stored.read()
    if tuple(stored.shape) == tuple(parameter.shape):
        shape, offsets = shape_and_offsets(parameter)
        local = stored.read_slice(offsets, shape).to(local_of(parameter).device, copy=True)
        return like(parameter, local)
    whole = stored.read().to(local_of(parameter).device)
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def carry_slots(optimizer: Optimizer, old: Tensor, new: nn.Parameter) -> None:
    """Keep an optimizer's full state of a parameter for the sharded parameter."""
    slots = optimizer.state.pop(old, None)
    if slots:
        optimizer.state[new] = slots


def shard_slots(optimizer: Optimizer, old: Tensor, new: nn.Parameter) -> None:
    """Shard an optimizer's state of a parameter like the parameter.

    Raises:
        ConfigurationError: a slot has neither the parameter's shape nor a single element.
    """
    slots = optimizer.state.pop(old, None)
    if not slots:
        return
    assert isinstance(new, DTensor)
    shape, offsets = shape_and_offsets(new)
    split: dict[str, Any] = {}
    for slot, value in slots.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != new.shape or is_quantized(value):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has stepped already, and its state {slot!r} of shape "
                    f"{list(value.shape)} cannot be split like its parameter of shape {list(new.shape)}: pass an "
                    "optimizer that has not stepped."
                )
            local = part_at(value, shape, offsets).to(local_of(new).device, copy=True)
            value = like(new, local)
        split[slot] = value
    optimizer.state[new] = split
