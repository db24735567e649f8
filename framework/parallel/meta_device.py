"""Moving parameters and buffers to and from the meta device, preserving ties and ``requires_grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..distributed.world import World

Owner = tuple[nn.Module, str]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer once, with its first name; includes buffers outside the state dict."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def owners_of(module: nn.Module) -> dict[int, list[Owner]]:
    """Map the ``id`` of each parameter and buffer to its registrations (table and key); a tied one has several."""
    owners: dict[int, list[Owner]] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append((part, name))
    return owners


def replace_tensors(module: nn.Module, new: Callable[[str, Tensor], Tensor | None]) -> None:
    """Replace each tensor for which ``new`` returns another, in every place where it is registered."""
    owners = owners_of(module)
    for name, tensor in list(tensors_of(module)):
        fresh = new(name, tensor)
        if fresh is None:
            continue
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        for part, key in owners[id(tensor)]:
            table = part._parameters if isinstance(tensor, nn.Parameter) else part._buffers
            table[key] = fresh  # type: ignore[assignment]


def is_held(tensor: Tensor) -> bool:
    """Whether this process holds all of a tensor: it is neither on the meta device nor a shard of a subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def without_data(module: nn.Module, world: World) -> set[str]:
    """Return the names of tensors that are on the meta device on some rank. Collective.

    After a fit under a strategy that shards weights, rank 0 has the full weights; other ranks have them on the meta
    device.

    Raises:
        ConfigurationError: rank 0 has no data for a tensor either. Raised on all ranks.
    """
    lacking = world.all_gather_object([name for name, tensor in tensors_of(module) if tensor.is_meta])
    if lacking[0]:
        raise ConfigurationError(
            f"{lacking[0][0]} is on the meta device, and this strategy needs weights that have data: build the module "
            "on a real device, or its large layers in configure_model."
        )
    return {name for names in lacking for name in names}


@torch.no_grad()
def fill_from_rank_zero(module: nn.Module, world: World) -> None:
    """Copy rank 0's data to the tensors that have none on this rank, one at a time. Collective.

    Raises:
        ConfigurationError: rank 0 has no data for a tensor either. Raised on all ranks.
    """
    wanted = without_data(module, world)
    if not wanted:
        return

    def fill(name: str, tensor: Tensor) -> Tensor | None:
        if name not in wanted:
            return None
        data = torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor.detach().to(world.device)
        world.broadcast(data)
        return data if tensor.is_meta else None

    replace_tensors(module, fill)


@torch.no_grad()
def share_buffers(module: nn.Module, world: World) -> None:
    """Broadcast rank 0's buffers to all ranks, in one message per dtype. Collective."""
    if world.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = world.broadcast(torch.cat([buffer.detach().reshape(-1) for buffer in buffers]))
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
