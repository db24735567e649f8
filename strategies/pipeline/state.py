"""Canonical state of a model whose stages are on different ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.checkpoint.stored_tensor import StoredTensors
from ...framework.checkpoint.write_plan import Shard
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.quantized_state import join_slots, split_slots
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import (
    CanonicalState,
    Slots,
    shard_if_tensor,
    torch_state_dict,
    whole_of,
)
from ...framework.parallel.full_tensors import whole_tensors
from ...framework.parallel.meta_device import replace_tensors, tensors_of
from ...framework.parallel.parameter_names import state_tensors


class StagedState(CanonicalState):
    """Saves and loads the tensors that this rank holds.

    Args:
        world: the ranks.
        rank: the number of this rank in its pipeline.
        last: the number of the rank that holds the last stage.
        owners: by the ``id`` of a parameter or buffer, the number of the rank that holds it; None for one that all
            hold.
    """

    def __init__(self, world: World, rank: int, last: int, owners: Mapping[int, int | None]) -> None:
        self._world, self._rank, self._last = world, rank, last
        self._owners = owners

    def _saves(self, tensor: Tensor) -> bool:
        """Whether this rank has the value of a tensor that is saved.

        Buffers that all ranks hold have it where the step runs to its end.
        """
        owner = self._owners.get(id(tensor))
        if isinstance(tensor, nn.Parameter):
            return owner in (None, self._rank)
        return self._world.data_rank == 0 and self._rank == (self._last if owner is None else owner)

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return the tensors of this rank's stages, and those that all ranks hold."""
        return {
            name: Shard.whole(tensor.detach()) for name, tensor in state_tensors(module).items() if self._saves(tensor)
        }

    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Load the tensors that this rank holds."""
        own = state_tensors(module)
        with torch.no_grad():
            for name, stored in tensors.items():
                tensor = own[name]
                if not tensor.is_meta:
                    tensor.copy_(stored.read())

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield the state of the parameters that this rank holds, and the numbers of the others. Collective."""
        own: dict[int, dict[str, Any]] = {}
        for position, parameter in enumerate(parameters_of(optimizer)):
            if slots := optimizer.state.get(parameter):
                own[position] = {slot: shard_if_tensor(value) for slot, value in split_slots(slots).items()}
        # Rank 0 writes the numbers of all parameters.
        numbers = {
            position: {slot: value for slot, value in slots.items() if not isinstance(value, Shard)}
            for position, slots in own.items()
        }
        others = {
            position: slots for each in self._world.all_gather_object(numbers) for position, slots in each.items()
        }
        for position, parameter in enumerate(parameters_of(optimizer)):
            if position in own or position in others:
                yield parameter, own.get(position) or others[position]

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Load the state of the parameters that this rank holds."""
        own = [
            {} if parameter.is_meta else join_slots({slot: whole_of(value) for slot, value in slots.items()})
            for parameter, slots in zip(parameters_of(optimizer), state, strict=True)
        ]
        optimizer.load_state_dict(torch_state_dict(optimizer, own, groups))

    @torch.no_grad()
    def gather(self, module: nn.Module) -> None:
        """Give rank 0 the tensors of all stages. Collective."""
        named = dict(tensors_of(module))
        shards = {name: Shard.whole(tensor.detach()) for name, tensor in named.items() if self._saves(tensor)}
        found: dict[str, Tensor] = {}
        for name, whole in whole_tensors(shards, self._world):
            if self._world.is_global_zero and name not in shards:
                found[name] = whole.to(self._world.device)
        replace_tensors(module, lambda name, tensor: found.get(name))

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Send buffers from the rank that holds their values to all ranks. Collective."""
        for buffer in module.buffers():
            owner = self._owners.get(id(buffer))
            source = self._last if owner is None else owner
            sent = self._world.broadcast(buffer.detach().contiguous(), source)
            if sent.data_ptr() != buffer.data_ptr():
                buffer.copy_(sent)
