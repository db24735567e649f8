"""Initial weights of the stages that a rank of a pipeline holds in full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..fsdp.initial import Origins, take_away
from ..fsdp.state import carry_slots


@torch.no_grad()
def fill_stages(
    module: nn.Module, optimizers: Sequence[Optimizer], elsewhere: set[nn.Parameter], origins: Origins
) -> None:
    """Give this rank rank 0's values of its parameters, one parameter at a time. Collective.

    Args:
        module: the user's module.
        optimizers: its optimizers, which get the new parameters.
        elsewhere: the parameters of stages that this rank does not hold. They remain on the meta device.
        origins: the values.
    """
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
