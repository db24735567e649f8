"""Tensors on the meta device: giving them data, and taking it away, without losing what is tied or frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..distributed.world import World

Owner = tuple[nn.Module, str]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer once, by its first name, buffers outside the state dict too."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def owners_of(module: nn.Module) -> dict[int, list[Owner]]:
    """Return where each parameter and buffer is registered, by its identity: a tied one at several places."""
    owners: dict[int, list[Owner]] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append((part, name))
    return owners


def replace_tensors(module: nn.Module, new: Callable[[str, Tensor], Tensor | None]) -> None:
    """Put another tensor in the place of each for which ``new`` returns one, wherever it is tied."""
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


def without_data(module: nn.Module, world: World) -> set[str]:
    """Return the names of tensors that are on the meta device on some rank. Collective.

    After a fit under a strategy that splits weights they are whole on rank 0, and on the meta device elsewhere.

    Raises:
        ConfigurationError: on all ranks; rank 0 has none either.
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
    """Give tensors that have no data here those of rank 0, one after the other. Collective.

    Raises:
        ConfigurationError: on all ranks; rank 0 has none either.
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
    """Give all ranks rank 0's buffers, those of a dtype in one message. Collective."""
    if world.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = world.broadcast(torch.cat([buffer.detach().reshape(-1) for buffer in buffers]))
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


def to_meta(module: nn.Module) -> None:
    """Let go of all parameters' data; names, shapes, ties and what is frozen stay."""
    replace_tensors(module, lambda _, tensor: tensor.detach().to("meta") if isinstance(tensor, nn.Parameter) else None)
