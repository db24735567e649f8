"""Outputs of evaluation and random numbers on all ranks of a pipeline, for loops that run on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...framework.distributed.seed import capture, restore
from ...framework.distributed.world import World
from .schedules import Place


class Outputs:
    """Gives the output of a step, which the rank with the last stage has, to all ranks of a pipeline.

    Constructing it is collective: ranks that compute the same draw the same random numbers from then on, those of the
    first of them. A loop need not seed its ranks, whose random numbers then differ.

    Args:
        group: the ranks of the pipeline.
        place: the stages and ranks.
        world: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup, place: Place, world: World) -> None:
        self._group, self._device = group, world.device
        self._source = dist.get_global_rank(group, place.rank_of(place.stages - 1))
        self._is_source = self._source == world.rank
        states = world.all_gather_object((world.identical_group, capture()))
        restore(next(state for group, state in states if group == world.identical_group))

    def share(self, output: Any) -> Any:
        """Return the output of the rank with the last stage: its tensors, and a copy of what holds them. Collective."""
        from lightning_utilities.core.apply_func import apply_to_collection

        tensors: list[Tensor] = []

        def emptied(tensor: Tensor) -> Tensor:
            tensors.append(tensor.detach().contiguous())
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        sent: list[Any] = [None, None]
        if self._is_source:
            sent = [apply_to_collection(output, Tensor, emptied), None]
            sent[1] = [tensor.device.type for tensor in tensors]
        dist.broadcast_object_list(sent, self._source, group=self._group)
        if self._is_source:
            for tensor in tensors:
                dist.broadcast(tensor, self._source, group=self._group)
            return output
        devices: Iterator[str] = iter(sent[1])

        def filled(empty: Tensor) -> Tensor:
            device = self._device if next(devices) == self._device.type else torch.device("cpu")
            received = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            dist.broadcast(received, self._source, group=self._group)
            return received

        return apply_to_collection(sent[0], Tensor, filled)
