"""Averages over the ranks of gradients that every rank holds in full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed.world import World


def average_gradients(world: World, parameters: Sequence[Tensor]) -> None:
    """Average gradients in one flat reduction for each dtype. Collective.

    A parameter without gradient on this rank counts as zero if another rank has a gradient, and stays without one if no
    rank has one. On a CPU the same reduction carries the flags for this. On other devices they are reduced over the
    host, which would have to wait for the device to read them.
    """
    if world.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        # Parameters that require no gradient now are included: they may have one from before toggle_optimizer.
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    reduce = _reduce_group if world.device.type == "cpu" else _reduce_on_device
    for group in by_dtype.values():
        reduce(world, group)


def _reduce_on_device(world: World, parameters: list[Tensor]) -> None:
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters], dtype=torch.float64)
    anywhere = world.all_reduce(present).tolist()
    chosen = [parameter for parameter, count in zip(parameters, anywhere, strict=True) if count]
    if not chosen:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    flat = world.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), "mean")
    parts = flat.split([gradient.numel() for gradient in gradients])
    for parameter, gradient, part in zip(chosen, gradients, parts, strict=True):
        parameter.grad = part.view_as(gradient)


def _reduce_group(world: World, parameters: list[Tensor]) -> None:
    present = [float(parameter.grad is not None) for parameter in parameters]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flags = torch.tensor(present, dtype=gradients[0].dtype, device=gradients[0].device)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients] + [flags])
    world.all_reduce(flat, "mean")
    sizes = [gradient.numel() for gradient in gradients] + [len(present)]
    *parts, anywhere = flat.split(sizes)
    for parameter, gradient, part, exists in zip(parameters, gradients, parts, anywhere.tolist(), strict=True):
        if exists > 0:
            parameter.grad = part.view_as(gradient)
