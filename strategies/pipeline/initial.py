"""Initial weights of the stages that a rank of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ...framework.parallel.meta_device import share_buffers
from ..fsdp.initial import Origins, allocate_buffers, check_buffers, take_away
from ..fsdp.state import carry_slots
from .blocks import Stages
from .mesh import StageMesh
from .schedules import Place
from .shards import StageShards, check_sharded


def fill_stages(
    module: nn.Module, optimizers: Sequence[Optimizer], stages: Stages, place: Place, mesh: StageMesh, origins: Origins
) -> StageShards | None:
    """Give this rank rank 0's values of the tensors that it holds, or its shards of them. Collective.

    The parameters of other ranks' stages are on the meta device afterwards.

    Args:
        module: the user's module.
        optimizers: its optimizers, which get the new parameters.
        stages: the division of the module.
        place: the stages of this rank.
        mesh: the ranks.
        origins: the values.

    Returns:
        The shards; None if this rank holds its stages in full.
    """
    if mesh.data is not None:
        check_sharded(module, optimizers)
    owners = stages.owners(module, place)
    elsewhere = {parameter for parameter in module.parameters() if owners[id(parameter)] not in (None, place.rank)}
    computed = allocate_buffers(module, origins.world, origins.supplied)
    shards = None
    if mesh.data is None:
        _fill(module, optimizers, elsewhere, origins)
    else:
        own = [block for number, block in enumerate(stages.blocks) if stages.stage_of(number) in place.own]
        shards = StageShards(module, optimizers, own, elsewhere, mesh, origins)
    check_buffers(computed)
    share_buffers(module, origins.world)
    return shards


@torch.no_grad()
def _fill(module: nn.Module, optimizers: Sequence[Optimizer], elsewhere: set[nn.Parameter], origins: Origins) -> None:
    """Fill parameters in full, one at a time. Collective."""
    sources = take_away(module, optimizers)
    while sources:
        source = sources.pop(0)
        given = source.given
        whole = origins.value(source.name, given)
        if given not in elsewhere:
            if whole is None:
                whole = torch.empty(given.shape, dtype=given.dtype, device=origins.world.device)
            parameter = nn.Parameter(whole, requires_grad=given.requires_grad)
            source.put(parameter)
            for optimizer in optimizers:
                carry_slots(optimizer, given, parameter)
        del whole  # before the next one takes memory
        origins.release(given)
