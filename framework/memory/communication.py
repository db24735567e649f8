"""Formulas for the bytes that each rank sends in an optimizer step under a strategy, given a model's size.

A ring of W ranks reduces N bytes to all of them in 2 (W - 1) / W N bytes that each rank sends, twice what it needs to
gather N bytes from parts or to reduce them into parts: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations". Other algorithms send as many bytes, and differ in the number of messages.

The operations are those of Rajbhandari et al. 2020, "ZeRO", section 7, and Zhao et al. 2023, "PyTorch FSDP", section 3:
replicas reduce gradients to all ranks; what is split is reduced into parts; split parameters are gathered for the
forward and again for the backward pass of each micro-batch, and without a split once after the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.precision import Precision
from ..parallel.strategy import MemoryLayout
from .formulas import ModelSize, Ranks, shard_of

# Bytes that a rank sends for each byte of the full tensors, times (W - 1) / W, in a ring of W ranks.
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


@dataclass(frozen=True)
class Transfer:
    """One kind of collective in an optimizer step. Its tensors may be sent in several pieces."""

    operation: str
    """``"all-reduce"``, ``"all-gather"`` or ``"reduce-scatter"``."""
    what: str
    times: int
    """The number of times that everything is sent in a window."""
    sent: int
    """Bytes that a rank sends in a window."""


def communication(
    layout: MemoryLayout, size: ModelSize, ranks: Ranks, precision: Precision, window: int = 1
) -> tuple[Transfer, ...]:
    """Return the collectives of an optimizer step, without those of a few bytes.

    Args:
        window: micro-batches of the step.
    """
    return tuple(each for each in _transfers(layout, size, ranks, precision, window) if each.sent)


def _transfers(
    layout: MemoryLayout, size: ModelSize, ranks: Ranks, precision: Precision, window: int
) -> Iterator[Transfer]:
    split = shard_of(layout, ranks)
    compute, reduction = precision.compute_dtype.itemsize, precision.reduction_dtype.itemsize
    if layout.replicates:
        gradients = size.trainable * precision.parameter_dtype.itemsize
        yield _transfer("all-reduce", "gradients", 1, gradients, ranks.replicas)
        return
    if not layout.splits_state:
        return
    if not layout.splits_parameters:
        # Stage 2 keeps no full gradients, so it reduces those of every micro-batch.
        times = window if layout.splits_gradients else 1
        yield _transfer("reduce-scatter", "gradients", times, size.trainable * compute, split)
        yield _transfer("all-gather", "parameters", 1, size.trainable * compute, split)
        return
    yield _transfer("all-gather", "parameters", 2 * window, size.elements * compute, split)
    times, width = (window, compute) if layout.engine else (1, reduction)
    yield _transfer("reduce-scatter", "gradients", times, size.trainable * width, split)
    replicas = max(1, ranks.replicas // split)
    part = -(-size.trainable * width // split)
    yield _transfer("all-reduce", "gradients of replicas", times, part, replicas)


def _transfer(operation: str, what: str, times: int, held: int, ranks: int) -> Transfer:
    passes = 2 if operation == "all-reduce" else 1
    return Transfer(operation, what, times, passes * times * held * (ranks - 1) // ranks)


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in an optimizer step, over groups of the same ranks."""

    operation: str
    """``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``, ``"broadcast"`` or ``"send"``."""
    axis: str
    """The axes along which the ranks of a group differ, such as ``"tp"`` or ``"dp_shard x cp"``."""
    ranks: int
    """The number of ranks of a group."""
    times: int
    payload: int
    """Bytes of the full tensors, in all of them together."""

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        if self.operation not in _PASSES:
            return self.payload
        return _PASSES[self.operation] * self.payload * (self.ranks - 1) // self.ranks
