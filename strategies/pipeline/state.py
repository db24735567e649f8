"""Canonical state of a model whose stages are on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...framework.distributed.world import World
from ...framework.parallel.full_tensors import device_of_whole, whole_tensors
from ...framework.parallel.meta_device import replace_tensors, tensors_of
from ..fsdp.state import ShardedState, shard_of
from .schedules import Place


class StagedState(ShardedState):
    """Saves and loads the tensors that this rank holds, or its shards of them.

    Args:
        place: the stages of this rank.
        owners: by the ``id`` of a parameter or buffer, the position in the pipeline of the rank that holds it; None for
            one that all hold.
        stride: the distance between two ranks of a pipeline.
        free: frees gathered parameters, so that the module holds its shards; None if there are no shards.
    """

    def __init__(
        self,
        world: World,
        place: Place,
        owners: Mapping[int, int | None],
        stride: int,
        free: Callable[[], None] | None,
    ) -> None:
        super().__init__(world, free)
        self._pipeline_rank = place.rank
        self._owners, self._stride = owners, stride

    def _saves(self, tensor: Tensor) -> bool:
        """Whether this rank has the value of a tensor, or a part of it, that is saved.

        A buffer that all ranks of a pipeline hold is saved by the first one, which computes the last stage.
        """
        if isinstance(tensor, nn.Parameter):
            return self._owners.get(id(tensor)) in (None, self._pipeline_rank)
        return self._world.rank == self._source_of(tensor)

    def _source_of(self, buffer: Tensor) -> int:
        """Return the rank that has the value of a buffer."""
        return (self._owners.get(id(buffer)) or 0) * self._stride

    def _plain_of_owners(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return the numbers and 0-d tensors of the state of all parameters, by position. Collective.

        Rank 0 writes them.
        """
        return self._gathered_plain(optimizer, lambda _: True)

    @torch.no_grad()
    def gather(self, module: nn.Module) -> None:
        """Give rank 0 the tensors of all stages, on the CPU if its device cannot hold them. Collective.

        Other ranks keep those that they hold in full; sharded ones become empty meta tensors there.
        """
        named = dict(tensors_of(module))
        shards = {name: shard_of(tensor) for name, tensor in named.items() if self._saves(tensor)}
        split = [each for name, each in named.items() if name not in shards or isinstance(each, DTensor)]
        sizes = [each.numel() * each.element_size() for each in split] if self._world.is_global_zero else []
        device = device_of_whole(sizes, self._world.device)
        found: dict[str, Tensor] = {}
        for name, whole in whole_tensors(shards, self._world):
            if self._world.is_global_zero and (name not in shards or isinstance(named[name], DTensor)):
                found[name] = whole.to(device)

        def held(name: str, tensor: Tensor) -> Tensor | None:
            if isinstance(tensor, DTensor) and name not in found:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return found.get(name)

        replace_tensors(module, held)
        if device != self._world.device:
            module.to(device)

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Send buffers from the rank that holds their values to all ranks. Collective."""
        for buffer in module.buffers():
            sent = self._world.broadcast(buffer.detach().contiguous(), self._source_of(buffer))
            if sent.data_ptr() != buffer.data_ptr():
                buffer.copy_(sent)
