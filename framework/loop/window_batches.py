"""The micro-batches of a window with their weights, fetched in turn and followed by fillers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..data.accumulation_window import MicroBatches
from .filler_batches import FILLER, LockstepFiller

T = TypeVar("T")


def with_weights(
    batches: MicroBatches,
    batch_weight: Callable[[Any], int | float | Tensor] | None,
    samples: Sequence[float] | None = None,
) -> tuple[MicroBatches, Sequence[float]]:
    """Return the micro-batches and their weights. To compute weights of the user's own, all batches are fetched.

    ``samples``: the number of samples of each, which are then the weights; None for weights of 1.
    """
    if batch_weight is None:
        return batches, (1.0,) * len(batches) if samples is None else samples
    fetched = list(batches)
    return fetched, [float(batch_weight(batch)) for batch in fetched]


def timed(batches: Iterable[T], notes: Sequence[Callable[[float], None]]) -> Iterator[T]:
    """Yield the batches; call all ``notes`` with the seconds that each fetch took."""
    began = time.perf_counter()
    for batch in batches:
        seconds = time.perf_counter() - began
        for note in notes:
            note(seconds)
        yield batch
        began = time.perf_counter()


def with_fillers(
    batches: MicroBatches,
    weights: Sequence[float],
    notes: Sequence[Callable[[float], None]],
    filler: LockstepFiller | None,
) -> Iterator[tuple[Any, float]]:
    """Yield each micro-batch, fetched when it is requested, and its weight; then fillers of weight 0 without end.

    All ``notes`` are called with the seconds that each fetch took, where there are several.
    """
    coming = iter(batches) if len(batches) < 2 else timed(batches, notes)
    yield from zip(coming if filler is None else filler.noted(coming), weights, strict=True)
    while True:
        yield FILLER, 0.0
