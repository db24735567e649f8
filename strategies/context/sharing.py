"""Functions by which strategies set up context parallelism; its code is imported only where ranks share sequences."""

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
    """Return a function that returns the context of a backward pass; with context parallelism, one of full attention.

    A backward pass calls attention where it recomputes activations.
    """
    return nullcontext if sequences is None else sequences.attention
