"""The rounds of a pass over the data: one batch for each rank, with information that all ranks share.

In a *round* each rank gets one batch. Before a round begins, every rank must know which ranks have data and whether the
round is the last. If the number of batches is known, so is all of this; otherwise the ranks communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..core.proxy import Wrapper
from ..distributed.data_parallel import DataRanks, part_of
from ..distributed.gather import rows_in, slice_rows
from .map_source import MapSource
from .orders import length_of
from .training_source import NO_BATCH, CountedSource, Position, TrainingSource

_END = object()


class Round(NamedTuple):
    """This rank's batch or ``NO_BATCH``, the ranks that have one, and whether no round follows."""

    batch: Any
    holders: Sequence[int]
    last: bool


Rounds = Iterator[Round]


def holders_of_last(source: TrainingSource, given: Any, position: Position | None, size: int) -> Sequence[int] | None:
    """Return the ranks that have data in the last round of a sharded source, or None if unknown in advance."""
    if not isinstance(source, CountedSource):
        return None
    if isinstance(source, MapSource):
        total = source.total_items()
    else:
        # The length of a DataLoader over an IterableDataset is an estimate.
        total = None if isinstance(given, torch.utils.data.DataLoader) else length_of(given)
    count = source.len_batches(position)
    if total is None or count is None:
        return None
    rounds = count - source.batches_before(position)
    rest = total - source.items_before(position) - (rounds - 1) * source.span
    return range(min(size, rest)) if rest < source.span else range(size)


def known_rounds(batches: Iterator[Any], rounds: int, last_holders: Sequence[int], size: int) -> Rounds:
    """Yield rounds whose number is known."""
    everyone = range(size)
    for number, batch in enumerate(batches, 1):
        last = number >= rounds
        yield Round(batch, last_holders if last else everyone, last)


def asked_rounds(batches: Iterator[Any], world: DataRanks) -> Rounds:
    """Yield rounds until no rank has a batch; ranks exchange in each round whether they have another. Collective per
    round."""
    batch, holders = _next(batches, world)
    while holders:
        following, next_holders = _next(batches, world)
        yield Round(batch, holders, not next_holders)
        batch, holders = following, next_holders


def _next(batches: Iterator[Any], world: DataRanks) -> tuple[Any, Sequence[int]]:
    batch = next(batches, NO_BATCH)
    if world.size == 1:
        return batch, range(batch is not NO_BATCH)
    flags = [0.0] * world.size
    flags[world.rank] = batch is not NO_BATCH
    return batch, [rank for rank, flag in enumerate(world.control_reduce(flags).wait()) if flag]


def local_rounds(batches: Iterator[Any], rounds: int | None, rank: int) -> Rounds:
    """Yield only this rank's batches, without regard to other ranks."""
    own = [rank]
    if rounds is not None:
        for number, batch in enumerate(batches, 1):
            if batch is NO_BATCH:
                return
            yield Round(batch, own, number >= rounds)
        return
    batch = next(batches, NO_BATCH)
    while batch is not NO_BATCH:
        following = next(batches, NO_BATCH)
        yield Round(batch, own, following is NO_BATCH)
        batch = following


def dispatched_rounds(batches: Iterator[Any], world: DataRanks, split: bool) -> Rounds:
    """Yield rounds that rank 0 reads and sends: a batch for each rank, or with ``split`` a part of a batch. Collective.

    ``batches`` is read on rank 0 only.
    """
    parts = _read_round(batches, world.size, split) if world.is_global_zero else []
    while True:
        following = _read_round(batches, world.size, split) if world.is_global_zero and parts else []
        received: list[Any]
        received, last = world.broadcast_object((parts, not following))
        if not received:
            return
        own = received[world.rank] if world.rank < len(received) else NO_BATCH
        yield Round(own, range(len(received)), last)
        if last:
            return
        parts = following


def _read_round(batches: Iterator[Any], size: int, split: bool) -> list[Any]:
    if not split:
        found: list[Any] = []
        while len(found) < size and (batch := next(batches, _END)) is not _END:
            found.append(batch)
        return found
    batch = next(batches, _END)
    return [] if batch is _END else split_batch(batch, size)


def split_batch(batch: Any, size: int) -> list[Any]:
    """Split a batch into parts for the ranks; fewer than ``size`` parts if it has fewer rows."""
    rows = rows_in(batch)
    return [slice_rows(batch, *part_of(rows, rank, size)) for rank in range(min(rows, size))]


class SplitBatches(Wrapper):
    """A loader of global batches of which each rank takes its rows; ``NO_BATCH`` if there are fewer rows than ranks."""

    def __init__(self, loader: Any, rank: int, size: int) -> None:
        super().__init__(loader)
        self._rank = rank
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        for batch in self._original:
            rows = rows_in(batch)
            yield slice_rows(batch, *part_of(rows, self._rank, self._size)) if self._rank < rows else NO_BATCH

    def __len__(self) -> int:
        return len(self._original)
