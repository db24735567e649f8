"""Access of strategies to context parallelism, which is loaded only where ranks share sequences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...framework.core.degrees import Layout
from ...framework.distributed.world import World
from ...framework.parallel.sequence_part import SequencePart
from . import ContextParallel

NO_COMPILING = "routes attention in every step under parallel={'cp': ...}: leave compile out, or leave cp out"


def sharing_sequences(world: World, layout: Layout) -> tuple[ContextParallel | None, SequencePart]:
    """Return the ranks that share sequences with this one, None if none do, and the part of this rank. Collective."""
    if layout.cp == 1:
        return None, SequencePart()
    found = ContextParallel(world, layout)
    return found, found.part


def attention_of(sequences: ContextParallel | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of backward passes, in which activations that are computed again attend again."""
    return nullcontext if sequences is None else sequences.attention
