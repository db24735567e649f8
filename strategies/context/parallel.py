"""``ContextParallel``: the part of a strategy that shares sequences over ranks, beside any way of sharing the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from ...framework.core.degrees import Layout
from ...framework.distributed.world import World
from ...framework.parallel.sequence_part import SequencePart
from ...framework.parallel.strategy import StepFunction
from .attention import HeadExchange, RingAttention, RoutedAttention


class ContextParallel:
    """The ranks that share sequences with this one. Constructing it is collective.

    Args:
        world: the ranks.
        layout: the number of them along each axis.
    """

    def __init__(self, world: World, layout: Layout) -> None:
        names, sizes = ("others", "context", "tensor"), (world.size // (layout.cp * layout.tp), layout.cp, layout.tp)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)["context"]
        self.part = SequencePart(mesh.get_local_rank(), layout.cp)
        ring = world.device.type == "cuda"
        self._compute = RingAttention(mesh) if ring else HeadExchange(mesh.get_group())

    def attention(self) -> AbstractContextManager[Any]:
        """Return a context in which attention covers full sequences, of which every rank has its part."""
        # Steps may compute full sequences on every rank, to compare: ``SequencePart.whole``.
        return RoutedAttention(self._compute) if self.part.size > 1 else nullcontext()

    def routed(self, step: StepFunction) -> StepFunction:
        """Return a step whose attention covers full sequences."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.attention():
                return step(*args, **kwargs)

        return run
