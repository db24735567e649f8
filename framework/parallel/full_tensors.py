"""Gathering of full tensors from the shards of all ranks, one at a time, and the device that can hold them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.manifest import is_flat
from ..checkpoint.write_plan import Shard
from ..core.accelerators import free_memory
from ..distributed.devices import empty_caches
from ..distributed.world import World


def device_of_whole(sizes: Sequence[int], device: torch.device) -> torch.device:
    """Return the device on which a rank keeps full tensors after a fit: its own, or the CPU if they do not fit.

    A model may be sharded because it fits into no single GPU.

    Args:
        sizes: the bytes of each full tensor; none on a rank that keeps none.
        device: the device of this rank.
    """
    if device.type == "cpu" or not sizes:
        return device
    # Without what torch caches: much of it lies between tensors, where no large one fits.
    empty_caches()
    free = free_memory(device)
    # Beside the last full tensor there are what was gathered for it and a copy.
    return device if free is None or sum(sizes) + 2 * max(sizes) <= free else torch.device("cpu")


def whole_tensors(shards: Mapping[str, Shard], world: World) -> Iterator[tuple[str, Tensor]]:
    """Yield each full tensor with its name: on the CPU of rank 0; on other ranks the value is undefined. Collective.

    Only one full tensor is on a device at a time.
    """
    mine = {
        name: (shard.shape, shard.offsets, tuple(shard.tensor.shape), shard.tensor.dtype)
        for name, shard in shards.items()
    }
    boxes_of_ranks = world.all_gather_object(mine)
    for name in dict.fromkeys(name for rank in boxes_of_ranks for name in rank):
        boxes = [rank.get(name) for rank in boxes_of_ranks]
        # A rank may hold no part of a tensor.
        shape, dtype = next((box[0], box[3]) for box in boxes if box is not None)
        if boxes[0] is not None and boxes[0][2] == shape:
            if world.is_global_zero:
                yield name, shards[name].tensor.detach().cpu()
            continue
        # If several ranks hold the same piece, the first one adds it.
        shard = shards.get(name) if boxes.index(boxes[world.rank]) == world.rank else None
        whole = assembled(shard, shape, dtype, world)
        if world.is_global_zero:
            yield name, whole.cpu()


def assembled(shard: Shard | None, shape: tuple[int, ...], dtype: torch.dtype, world: World) -> Tensor:
    """Return the full tensor, in ``dtype``, of which each rank has one shard or none. Collective."""
    is_number = dtype.is_floating_point or dtype.is_complex
    kept = torch.promote_types(dtype, torch.float32) if is_number else torch.int64
    whole = torch.zeros(shape, dtype=kept, device=world.device)
    if shard is not None and shard.tensor.numel():
        target = whole
        if is_flat(shape, shard.offsets):
            target = whole.view(-1).narrow(0, shard.offsets[0], shard.tensor.numel())
        else:
            for dim, (start, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
                target = target.narrow(dim, start, size)
        target.copy_(shard.tensor)
    # Each element is 0 on all ranks but one; as integers their sum keeps every bit, those of -0.0 and NaN too.
    world.all_reduce(_as_integers(whole))
    return whole.to(dtype)


def _as_integers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(torch.int32 if real.dtype == torch.float32 else torch.int64)
