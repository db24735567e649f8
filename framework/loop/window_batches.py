"""The micro-batches of a window with their weights, fetched in turn and followed by fillers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..data.accumulation_window import MicroBatches
from ..distributed.straggler import Pace
from .filler_batches import FILLER, LockstepFiller


def with_weights(
    batches: MicroBatches, batch_weight: Callable[[Any], int | float | Tensor] | None
) -> tuple[MicroBatches, Sequence[float]]:
    """Return the micro-batches and their weights. To compute weights of the user's own, all batches are fetched."""
    if batch_weight is None:
        return batches, (1.0,) * len(batches)
    fetched = list(batches)
    return fetched, [float(batch_weight(batch)) for batch in fetched]


def with_fillers(
    batches: MicroBatches, weights: Sequence[float], pace: Pace | None, filler: LockstepFiller | None
) -> Iterator[tuple[Any, float]]:
    """Yield each micro-batch, fetched when it is requested, and its weight; then fillers of weight 0 without end."""
    coming = iter(batches) if pace is None or len(batches) < 2 else pace.timed(batches)
    yield from zip(coming if filler is None else filler.noted(coming), weights, strict=True)
    while True:
        yield FILLER, 0.0
