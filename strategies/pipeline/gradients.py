"""Gradients of which each rank of a pipeline holds those of its stages, and all hold those of shared parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...framework.distributed.world import World
from ..fsdp.gradients import ShardedGradients
from ..fsdp.local_shards import like, local_of
from .mesh import StageMesh
from .shards import StageShards


class StagedGradients(ShardedGradients):
    """Operations on gradients that are averaged over replicas, and summed over the pipeline where they are shared.

    Args:
        mesh: the ranks of this pipeline, and those that hold the same stages.
        owners: by the ``id`` of a parameter, the number of the rank in the pipeline that holds it; None for one that
            all hold.
        shards: the shards of the parameters; None if each rank holds its stages in full.
    """

    def __init__(
        self, world: World, mesh: StageMesh, owners: Mapping[int, int | None], shards: StageShards | None
    ) -> None:
        super().__init__(world)
        self._pipeline, self._replicas = mesh.pipeline, mesh.replicas
        self._owners, self._shards = owners, shards

    # ---- after the last backward pass -----------------------------------------------------------------------------

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over replicas, and sum those of shared parameters over the pipeline. Collective."""
        held = [parameter for parameter in parameters if not parameter.is_meta]
        shared = [parameter for parameter in held if self._is_shared(parameter)]
        if self._shards is not None:
            self._reduce_shards(parameters, shared)
            return
        count = self._world.size // self._world.identical
        _reduce(shared, dist.group.WORLD, count)
        if count > 1:
            _reduce([parameter for parameter in held if not self._is_shared(parameter)], self._replicas, count)

    def _reduce_shards(self, parameters: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        """Average the gradients of shards, then sum those of shared parameters. Collective."""
        shards = self._shards
        assert shards is not None
        # For each rank of a pipeline, the number of ranks with a gradient of each parameter.
        ranks, own = dist.get_world_size(self._pipeline), dist.get_rank(self._pipeline)
        present = [0.0] * (ranks * shards.count)
        for number in shards.present:
            present[own * shards.count + number] = 1.0
        totals = self._world.control_reduce(present).wait()
        counts = [totals[rank * shards.count : (rank + 1) * shards.count] for rank in range(ranks)]
        shards.reduce([number for number, count in enumerate(counts[own]) if count])
        summed = [each for each in shared if any(row[shards.number_of(each)] for row in counts)]
        _sum(summed, self._pipeline)

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._owners.get(id(parameter)) is None

    # ---- before the update ----------------------------------------------------------------------------------------

    def full(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, sent by a rank that holds it. Collective."""
        gradient = super().full(parameter)
        owner = self._owners.get(id(parameter))
        if owner is None:
            return gradient
        source = dist.get_global_rank(self._pipeline, owner)
        exists = torch.tensor([float(gradient is not None)])
        dist.broadcast(exists, source, group=self._pipeline)
        if not exists.item():
            return None
        if gradient is None:
            gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._world.device)
        dist.broadcast(gradient, source, group=self._pipeline)
        return gradient

    def _copies(self, parameter: Tensor) -> int:
        copies = super()._copies(parameter)
        return copies if self._is_shared(parameter) else copies // dist.get_world_size(self._pipeline)


def _reduce(parameters: Sequence[Tensor], group: dist.ProcessGroup | None, divisor: int) -> None:
    """Sum gradients over a group and divide them. Collective.

    A parameter without a gradient on this rank counts as zero if another rank has one, and stays without if none has.
    """
    if not parameters:
        return
    # On the host, so that a device need not be waited for.
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(present, group=group)
    chosen = [parameter for parameter, count in zip(parameters, present.tolist(), strict=True) if count]
    _sum(chosen, group, divisor)


@torch.no_grad()
def _sum(parameters: Sequence[Tensor], group: dist.ProcessGroup | None, divisor: int = 1) -> None:
    """Sum gradients over a group and divide them, in one message for each dtype; missing ones are zero. Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for members in by_dtype.values():
        gradients = [local_of(torch.zeros_like(each) if each.grad is None else each.grad) for each in members]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if not flat.numel():
            # The rows of small parameters are with other shards.
            continue
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat.div_(divisor)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for parameter, gradient, part in zip(members, gradients, parts, strict=True):
            local = part.view_as(gradient)
            parameter.grad = like(parameter, local) if isinstance(parameter, DTensor) else local
