"""Hashes of the weights and the optimizer state that this rank holds, to find numbers that have changed.

The hash of a tensor is the exclusive or of the bits of its elements (``torch.hash_tensor``): it changes with any
flipped bit, takes one pass over memory, and does not depend on the order of a sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..checkpoint.write_plan import Shard
from ..parallel.parameter_names import canonical_names, names_of
from ..parallel.strategy import Strategy

Hashes = dict[str, int]
"""Hashes by what they are of, in the order of computation."""


@torch.no_grad()
def hash_of(tensor: Tensor) -> Tensor:
    """Return the hash of this rank's part of a tensor, as a 0-d tensor of int64 on its device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if not local.numel():
        return torch.zeros((), dtype=torch.int64, device=local.device)
    if not local.is_floating_point() or local.element_size() == 1:
        local = local.contiguous().view(-1).view(torch.uint8)
    return torch.hash_tensor(local).view(torch.int64)


def as_numbers(hashes: Mapping[str, Tensor]) -> Hashes:
    """Return hashes as numbers; waits for each device once."""
    numbers: Hashes = {}
    for device in dict.fromkeys(value.device for value in hashes.values()):
        names = [name for name, value in hashes.items() if value.device == device]
        numbers.update(zip(names, torch.stack([hashes[name] for name in names]).tolist(), strict=True))
    return {name: numbers[name] for name in hashes}


def folded(hashes: Mapping[str, int]) -> int:
    """Return one number for hashes and their names, the same in every process."""
    text = repr(sorted(hashes.items())).encode()
    return zlib.crc32(text) << 32 | zlib.adler32(text)


def first_difference(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return what is different first, in the order of computation; None without a difference."""
    return next((name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)), None)


def state_hashes(strategy: Strategy, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[int, Hashes]]:
    """Return the hashes of this rank's parts, each with a number that ranks with the same part share. Collective.

    The parts are the canonical state, and the weights of which forward passes use a copy.
    """
    canonical, names = canonical_names(module), names_of(module)
    parameters = {canonical(name): each for name, each in module.named_parameters()}
    found: dict[str, Shard] = {}
    for name, shard in strategy.state.model_state(module).items():
        # Buffers may change in a forward pass, and differ between ranks.
        if canonical(name) in parameters:
            found[canonical(name)] = shard
    for optimizer in optimizers:
        for parameter, slots in strategy.state.optimizer_state(optimizer):
            for slot, value in slots.items():
                if isinstance(value, Shard):
                    found[f"{slot} of {names.get(id(parameter), 'a parameter')}"] = value
    found = {name: shard for name, shard in found.items() if shard.tensor.device.type != "meta"}
    held = {shard.tensor.data_ptr() for shard in found.values()}
    used = {
        f"the copy of {name} for forward passes": Shard.whole(each.detach())
        for name, each in parameters.items()
        if not isinstance(each, DTensor) and each.device.type != "meta" and each.data_ptr() not in held
    }
    return [
        (
            folded({name: hash((shard.shape, shard.offsets, shard.tensor.shape)) for name, shard in part.items()}),
            as_numbers({name: hash_of(shard.tensor) for name, shard in part.items()}),
        )
        for part in (found, used)
        if part
    ]
