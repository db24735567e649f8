"""Collectives of the user's code within steps, in which ranks without a batch take part without a value.

Ranks may have different numbers of batches. Within the steps of a Trainer each collective of the user's code begins
with an exchange of headers. A rank that has no batch left sends an empty one: it is away, and answers the calls of the
others until all ranks are away. A rank that runs a filler batch makes the same calls as the others, and its header says
that its values do not count. The values of the other ranks are then exchanged as objects, without those of this rank.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, DesyncError
from .world import World

_RANKS_SHOWN = 8
Header = tuple[str, bool, Any]
"""The name of a collective, whether the values of the rank count, and their description."""
_AWAY = None


def answer(world: World) -> None:
    """Take part in the calls of ranks that have batches left, until no rank has any. Collective."""
    while any(header is not _AWAY for header in world.all_gather_object(_AWAY)):
        world.all_gather_object(_AWAY)


@contextmanager
def without_values(world: World) -> Generator[None, None, None]:
    """Run a filler batch: values of this rank do not count in collectives that it calls."""
    before = world.attendance.counts
    world.attendance.counts = False
    try:
        yield
    finally:
        world.attendance.counts = before


@contextmanager
def varying(world: World) -> Generator[None, None, None]:
    """Expect that ranks have different numbers of batches; calls in here are not those of training steps."""
    attendance = world.attendance
    varies, was_called = attendance.varies, attendance.was_called
    attendance.varies = world.size > 1
    try:
        yield
    finally:
        attendance.varies, attendance.was_called = varies, was_called


def call_roll(world: World, name: str, description: Any = None) -> list[Header | None]:
    """Exchange the headers of a collective; None for ranks that are away. Collective.

    Raises:
        DesyncError: ranks call different collectives.
        LoopError: no rank can call one here.
    """
    world.attendance.check(name)
    world.attendance.was_called = True
    own: Header | None = (name, world.attendance.counts, description)
    headers = world.all_gather_object(own)
    names = {rank: header[0] for rank, header in enumerate(headers) if header is not _AWAY}
    if len(set(names.values())) > 1:
        shown = ", ".join(f"rank {rank}: {each}" for rank, each in list(names.items())[:_RANKS_SHOWN])
        raise DesyncError(
            f"ranks call different collectives at the same time ({shown}): every rank must call the same."
        )
    return headers


def is_complete(headers: list[Header | None]) -> bool:
    """Whether all ranks are there, and the values of all count, or those of none: then the call is an ordinary one."""
    return _AWAY not in headers and len({header[1] for header in headers if header is not _AWAY}) == 1


def exchange(world: World, value: Any) -> dict[int, Any]:
    """Return the values that count by rank, with tensors on this rank's device. Collective.

    Called after ``call_roll`` by the ranks that are not away.
    """
    from lightning_utilities.core.apply_func import apply_to_collection

    def on_host(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    sent = (apply_to_collection(value, Tensor, on_host),) if world.attendance.counts else _AWAY
    found = {rank: each[0] for rank, each in enumerate(world.all_gather_object(sent)) if each is not _AWAY}
    moved: dict[int, Any] = apply_to_collection(found, Tensor, lambda tensor: tensor.to(world.device))
    return moved


def values_of_present(world: World, name: str, value: Any) -> dict[int, Any] | None:
    """Return the values of the ranks that have one, or None if all have: the collective then runs as usual. Collective.

    Outside of the steps of a Trainer every rank has one, and nothing is exchanged.
    """
    world.attendance.check(name)
    if not world.attendance.varies or is_complete(call_roll(world, name)):
        return None
    return exchange(world, value)


def parts_of_ranks(world: World, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of the ranks that have one, which may differ in shape. Collective."""
    (parts,) = all_parts(world, [tensor])
    return parts


def all_parts(world: World, tensors: list[Tensor], with_gradient: bool = False) -> list[list[Tensor]]:
    """Return, for each tensor, those of the ranks that have one; they may differ in shape. Collective.

    Raises:
        DesyncError: ranks gather different numbers of tensors.
        ConfigurationError: their dtypes differ.
    """
    described = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    headers = call_roll(world, "all_gather", described)
    if _AWAY in headers:
        values = exchange(world, tensors)
        return [list(parts) for parts in zip(*values.values(), strict=True)]
    everyone = is_complete(headers)
    counting = [rank for rank, header in enumerate(headers) if header is not _AWAY and (everyone or header[1])]
    known = [header[2] for header in headers if header is not _AWAY]
    if any(len(each) != len(tensors) for each in known):
        counts = ", ".join(f"rank {rank}: {len(each)}" for rank, each in enumerate(known[:_RANKS_SHOWN]))
        raise DesyncError(f"ranks gather collections with different numbers of tensors ({counts}).")
    results = []
    for number, tensor in enumerate(tensors):
        gathered = _gather_flat(world, tensor, [each[number] for each in known], with_gradient)
        results.append([gathered[rank] for rank in counting])
    return results


def _gather_flat(
    world: World, tensor: Tensor, described: list[tuple[tuple[int, ...], str]], with_gradient: bool
) -> list[Tensor]:
    """Return the tensors of all ranks, padded to the largest on the way if their shapes differ. Collective."""
    gather = _with_gradient if with_gradient and tensor.requires_grad else World.all_gather
    if all(each == described[0] for each in described):
        return list(gather(world, tensor).unbind())
    sizes = [torch.Size(shape).numel() for shape, _ in described]
    dtypes = {dtype for (_, dtype), size in zip(described, sizes, strict=True) if size}
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"tensors to be gathered have different dtypes on the ranks: {', '.join(sorted(dtypes))}."
        )
    flat = tensor.reshape(-1).to(getattr(torch, dtypes.pop())) if dtypes else tensor.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(max(sizes) - flat.numel())])
    rows = gather(world, padded).unbind()
    return [row[:size].view(shape) for row, size, (shape, _) in zip(rows, sizes, described, strict=True)]


def reduce_tensors(tensors: list[Tensor], op: str) -> Tensor:
    """Return the reduction of tensors by ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``."""
    stacked = torch.stack(tensors)
    if op in ("min", "max"):
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    return stacked.mean(0) if op == "mean" else stacked.sum(0, dtype=stacked.dtype)


def _with_gradient(world: World, tensor: Tensor) -> Tensor:
    stacked: Tensor = StackWithGradient.apply(world, tensor)  # type: ignore[no-untyped-call]
    return stacked


class StackWithGradient(torch.autograd.Function):
    """Stack the tensors of all ranks. The gradient of a rank's tensor is the sum over the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, world: World, tensor: Tensor) -> Tensor:
        ctx.world = world
        return world.all_gather(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        total: Tensor = ctx.world.all_reduce(gradients[0].contiguous().clone())
        return None, total[ctx.world.rank]
