"""Moving parameters and buffers to and from the meta device, preserving ties and ``requires_grad``.

Parts that Accelerate has placed are left alone: on devices of its choice, in the CPU's memory, or on the disk. Its
hooks bring their weights to the device that computes with them, and drop them afterwards. In between these parameters
may be on the meta device. No strategy moves or fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..distributed.world import World
from .parameter_names import canonical_names, canonical_table

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


def check_held(tensors: Mapping[str, Tensor], verb: str, alternative: str = "") -> None:
    """Refuse tensors that this process does not hold.

    Args:
        tensors: by name.
        verb: the method that needs them.
        alternative: what else may be done, such as ``", or ..."``.

    Raises:
        ConfigurationError: one of them is a shard, or on the meta device.
    """
    nowhere = next((name for name, tensor in tensors.items() if not is_held(tensor)), None)
    if nowhere is not None:
        raise ConfigurationError(
            f"{verb}: this process does not hold {nowhere!r}: call {verb} in a hook of the fit, such as on_train_end"
            f"{alternative}."
        )


def held_state(module: nn.Module, verb: str, alternative: str = "") -> dict[str, Tensor]:
    """Return a module's state by canonical name; see ``check_held``.

    Raises:
        ConfigurationError: this process does not hold one of the tensors.
    """
    state = module.state_dict()
    tensors = {name: state[raw] for name, raw in canonical_table(module).items()}
    check_held(tensors, verb, alternative)
    return tensors


def without_data(module: nn.Module, world: World, known: Collection[str] = ()) -> set[str]:
    """Return the names of tensors that are on the meta device on some rank, but those of ``known``. Collective.

    After a fit under a strategy that shards weights, rank 0 has the full weights; other ranks have them on the meta
    device. Parts that Accelerate has placed are left out: its hooks fill them.

    Raises:
        ConfigurationError: rank 0 has no data for a tensor either. Raised on all ranks.
    """
    placed = placed_tensors(module)
    empty = [
        name for name, tensor in tensors_of(module) if tensor.is_meta and name not in known and id(tensor) not in placed
    ]
    lacking = world.all_gather_object(empty)
    if lacking[0]:
        advice = "build the module on a real device, or its large layers in configure_model"
        if known:
            advice = "the files to load do not hold it, so build it on a real device"
        raise ConfigurationError(
            f"{lacking[0][0]} is on the meta device, and this strategy needs weights that have data: {advice}."
        )
    return {name for names in lacking for name in names}


def supplied_names(module: nn.Module, supplied: Collection[str]) -> set[str]:
    """Return the module's names of the tensors that are loaded later; ``supplied`` are canonical names."""
    if not supplied:
        return set()
    canonical = canonical_names(module)
    return {name for name, _ in tensors_of(module) if canonical(name) in supplied}


def check_same_parameters(module: nn.Module, world: World) -> None:
    """Refuse different parameters on the ranks: their collectives would not match, and the job would hang. Collective.

    Raises:
        ConfigurationError: a rank holds other parameters; the message names the first that differs.
    """
    own = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in module.named_parameters()]
    digest = sha256(repr(own).encode()).hexdigest()
    if all(other == digest for other in world.all_gather_object(digest)):
        return
    for rank, theirs in enumerate(world.all_gather_object(own)):
        if theirs != own:
            name = next((a[0] for a, b in zip(own, theirs, strict=False) if a != b), "how many there are")
            raise ConfigurationError(
                f"rank {rank} holds other parameters than rank {world.rank} (the first to differ: {name}): build the "
                "same model on all ranks, with the same layers tied and frozen; module.to('meta') cuts ties."
            )


@torch.no_grad()
def fill_from_rank_zero(module: nn.Module, world: World, supplied: Collection[str] = ()) -> None:
    """Copy rank 0's data to the tensors that have none on this rank, one at a time. Collective.

    Those that are loaded later, whose canonical names are ``supplied``, get memory without values.

    Raises:
        ConfigurationError: rank 0 has no data for a tensor either. Raised on all ranks.
    """
    later = supplied_names(module, supplied)
    wanted = without_data(module, world, later)
    if not wanted and not later:
        return

    def fill(name: str, tensor: Tensor) -> Tensor | None:
        if name in later and tensor.is_meta:
            return torch.empty_like(tensor, device=world.device)
        if name not in wanted:
            return None
        data = torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor.detach().to(world.device)
        world.broadcast(data)
        return data if tensor.is_meta else None

    replace_tensors(module, fill)


@torch.no_grad()
def share_tensors(module: nn.Module, world: World, supplied: Collection[str] = ()) -> None:
    """Copy rank 0's parameters and buffers to all ranks, one message for each, without further copies. Collective.

    Those that are loaded later, whose canonical names are ``supplied``, are left as they are.
    """
    if world.size == 1:
        return
    later = supplied_names(module, supplied)
    for name, tensor in tensors_of(module):
        if name in later or not tensor.numel():
            continue
        held = tensor.detach()
        sent = world.broadcast(held.contiguous())
        if not held.is_contiguous():
            held.copy_(sent)


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


def placed_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost placed parts by name; the whole module has the name ``""``."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        if not inside and _places(part.__dict__.get("_hf_hook")):
            found[name] = part
    return found


def placed_tensors(module: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter and buffer of the placed parts."""
    return {id(tensor) for part in placed_parts(module).values() for tensor in (*part.parameters(), *part.buffers())}


def move_others(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, except for its placed parts."""
    if not (outer := placed_parts(module)):
        module.to(device)
        return
    placed = {id(part) for top in outer.values() for part in top.modules()}

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    for part in module.modules():
        if id(part) not in placed:
            part._apply(move, recurse=False)


def _places(hook: Any) -> bool:
    """Whether a hook of Accelerate, or one of a sequence of hooks, brings weights to a device."""
    return any(hasattr(each, "execution_device") for each in getattr(hook, "hooks", (hook,)))
