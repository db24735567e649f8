"""Samplers: the samples of a rank as a pure function of (seed, epoch, position, rank, size).

``training_source`` defines the terms. In evaluation, batch i of the one-process order belongs entirely to rank
``i % size``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.position_rng import SeededBatch, SeededIndex, mix_seed
from ..core.proxy import Wrapper
from ..distributed.data_parallel import ceil_div, part_of
from .orders import LazyItems, Order, chunks


def rank_parts(
    items: Sequence[Any] | LazyItems, start: int, span: int, rank: int, size: int
) -> Iterator[tuple[int, int, Sequence[Any]]]:
    """Yield, for each ``span`` items from ``start``: their number, and the start and the items of the rank's part.

    The parts of other ranks are not copied, which would cost time proportional to the number of ranks.
    """
    if isinstance(items, LazyItems):
        return _lazy_parts(items, start, span, rank, size)
    begin, end = part_of(span, rank, size)
    rest = max(len(items) - start, 0) % span
    last = len(items) - rest
    # Without a Python function that is resumed for each: 1 us of the step of a small model.
    parts = map(slice, range(start + begin, last + begin, span), range(start + end, last + end, span))
    whole = zip(itertools.repeat(span), itertools.repeat(begin), map(items.__getitem__, parts))
    if not rest:
        return whole
    begin, end = part_of(rest, rank, size)
    return itertools.chain(whole, [(rest, begin, items[last + begin : last + end])])


def _lazy_parts(items: LazyItems, start: int, span: int, rank: int, size: int) -> Iterator[tuple[int, int, Any]]:
    for chunk in chunks(items, start, span):
        begin, end = part_of(len(chunk), rank, size)
        yield len(chunk), begin, chunk[begin:end]


def _every(
    items: Sequence[Any] | LazyItems, width: int, first: int, step: int, stop: int | None
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield every ``step``-th chunk of ``width`` items with its number, from ``first`` up to but excluding ``stop``."""
    if isinstance(items, LazyItems):
        yield from itertools.islice(enumerate(chunks(items, 0, width)), first, stop, step)
        return
    count = ceil_div(len(items), width)
    for number in range(first, count if stop is None else min(stop, count), step):
        yield number, items[number * width : (number + 1) * width]


class IndexSampler(Wrapper):
    """Replaces the sampler of a copied loader. ``epoch`` is set before ``iter()``; other attributes are the original's.

    Attributes:
        begun: Whether the sampler was iterated since this was last set to False.
    """

    def __init__(self, original: Any, order: Order, width: int, *, whole: bool, seed: int, seeded: bool) -> None:
        """``whole``: an item is an entire batch, or a sample that is not collated; else ``width`` items form a
        batch."""
        super().__init__(original)
        self.order = order
        self.width = width
        self.whole = whole
        self.epoch = 0
        self.begun = False
        self._seed = seed
        self._seeded = seeded

    def _pack(self, indices: Sequence[Any], first: int, epoch: int) -> Any:
        """Return the index object that the loader fetches for items beginning at position ``first`` of the order."""
        if not self._seeded:
            return indices[0] if self.whole else list(indices)
        seed = mix_seed(self._seed, epoch)
        if not self.whole:
            return SeededBatch(indices, seed, first)
        own = mix_seed(seed, first)
        return SeededBatch(indices[0], own, 0) if type(indices[0]) is list else SeededIndex(indices[0], own)


class TrainingSampler(IndexSampler):
    """A rank's part of every global micro-batch, beginning after ``start`` items of the order.

    Attributes:
        start: The number of items of the order that are already consumed.
        has_no_last_part: Whether the last global micro-batch of the last iteration contained no item for this rank.
        own_batches: The number of batches of this rank in the last iteration; None if unknown.
    """

    def __init__(
        self,
        original: Any,
        order: Order,
        width: int,
        *,
        rank: int,
        size: int,
        drop_last: bool,
        whole: bool,
        seed: int,
        seeded: bool,
    ) -> None:
        super().__init__(original, order, width, whole=whole, seed=seed, seeded=seeded)
        self.rank = rank
        self.size = size
        self.drop_last = drop_last
        self.start = 0
        self.has_no_last_part = False
        self.own_batches: int | None = None

    def read_from(self, start: int, epoch: int) -> None:
        """Read the order of an epoch after its first ``start`` items, from the next iteration on."""
        self.start, self.epoch = start, epoch

    @property
    def span(self) -> int:
        """The number of items in a global micro-batch."""
        return self.width * self.size

    def length(self, start: int = 0) -> int | None:
        """Return the number of global micro-batches after the first ``start`` items, or None if unknown."""
        total = self.order.length()
        if total is None:
            return None
        left = max(total - start, 0)
        return left // self.span if self.drop_last else ceil_div(left, self.span)

    def __len__(self) -> int:
        length = self.length(self.start)
        if length is None:
            raise TypeError(f"object of type {type(self._original).__name__!r} has no len()")
        return length

    def __iter__(self) -> Iterator[Any]:
        self.begun = True
        self.has_no_last_part = False
        # The order is computed here, not at the first ``next``: another epoch may be set in between.
        items = self.order.items(self.epoch)
        self.own_batches = None if isinstance(items, LazyItems) else self._count_own(len(items))
        return self._batches(items, self.start, self.epoch)

    def _count_own(self, total: int) -> int:
        full, rest = divmod(max(total - self.start, 0), self.span)
        begin, end = part_of(rest, self.rank, self.size)
        return full + (end > begin and not self.drop_last)

    def _batches(self, items: Sequence[Any] | LazyItems, start: int, epoch: int) -> Iterator[Any]:
        span = self.span
        packs = self._seeded or self.whole
        for count, begin, own in rank_parts(items, start, span, self.rank, self.size):
            if self.drop_last and count < span:
                return
            if not len(own):
                self.has_no_last_part = True
                return
            yield self._pack(own, start + begin, epoch) if packs else list(own)
            start += span


class EvaluationSampler(IndexSampler):
    """Every ``step``-th batch of the one-process order, from batch ``first`` up to but excluding ``stop``."""

    def __init__(
        self, original: Any, order: Order, width: int, *, drop_last: bool, whole: bool, seed: int, seeded: bool
    ) -> None:
        super().__init__(original, order, width, whole=whole, seed=seed, seeded=seeded)
        self.drop_last = drop_last
        self.first = 0
        self.step = 1
        self.stop: int | None = None
        self.records_indices = False
        """Whether to record the items of each batch until ``take_indices`` returns them."""
        self._recorded: deque[Sequence[Any]] = deque()

    def read_from(self, first: int, step: int, stop: int | None) -> None:
        """Read every ``step``-th batch from batch ``first`` on, below batch ``stop``, from the next iteration on."""
        self.first, self.step, self.stop = first, step, stop
        # A new queue: an iteration that ended early leaves the indices of batches that were read ahead.
        self._recorded = deque()

    def take_indices(self) -> list[Any] | None:
        """Return the items of the earliest batch not taken yet; None if no batch is recorded."""
        if not self._recorded:
            return None
        items = self._recorded.popleft()
        return list(items[0]) if self.whole and isinstance(items[0], Sequence) else list(items)

    def length(self) -> int | None:
        """Return the number of batches in the one-process order, or None if unknown."""
        total = self.order.length()
        if total is None:
            return None
        return total // self.width if self.drop_last else ceil_div(total, self.width)

    def __len__(self) -> int:
        length = self.length()
        if length is None:
            raise TypeError(f"object of type {type(self._original).__name__!r} has no len()")
        stop = length if self.stop is None else min(length, self.stop)
        return len(range(self.first, stop, self.step))

    def __iter__(self) -> Iterator[Any]:
        self.begun = True
        # Computed here as in training: the order belongs to this iteration.
        return self._batches(self.order.items(self.epoch), (self.first, self.step, self.stop), self.epoch)

    def _batches(
        self, items: Sequence[Any] | LazyItems, every: tuple[int, int, int | None], epoch: int
    ) -> Iterator[Any]:
        for number, chunk in _every(items, self.width, *every):
            if self.drop_last and len(chunk) < self.width:
                return
            if self.records_indices:
                self._recorded.append(chunk)
            yield self._pack(chunk, number * self.width, epoch)
