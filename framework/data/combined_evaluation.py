"""The source for several evaluation loaders that are read together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import TreeSpec, tree_unflatten

from ..core.errors import ConfigurationError
from .combined_loader import Rows, combined_length, merge
from .evaluation_source import EvaluationSource, NumberedBatches


class CombinedEvaluation(EvaluationSource):
    """Several evaluation sources read in parallel: row i of the one-process order goes to rank ``i % size``."""

    def __init__(
        self, parts: list[EvaluationSource], spec: TreeSpec, mode: str, name: str, *, rank: int, size: int
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._parts = parts
        self._spec = spec
        self._mode = mode
        if mode == "max_size_cycle" and any(not part.len_batches() for part in parts):
            raise ConfigurationError(
                f"{name} is a CombinedLoader(mode='max_size_cycle') with a loader without length; an evaluation "
                "distributes batches by number: give each loader a length above 0, or use mode='max_size'."
            )

    def len_batches(self) -> int | None:
        return combined_length(self._mode, [part.len_batches() for part in self._parts])

    def first_batches(self) -> list[str | None]:
        return [mark for part in self._parts for mark in part.first_batches()]

    def start_from(self, first: int, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        numbers: Iterator[int]
        rows: Rows
        if self._mode == "max_size_cycle":
            stop = min(each for each in (self.len_batches(), limit) if each is not None)
            numbers = iter(range(first, stop, self.size))
            rows = zip(*(self._cycle(part, first, epoch) for part in self._parts), strict=False)
        else:
            numbers = itertools.count(first, self.size)
            opened = [self._batches(part.start_from(first, epoch=epoch, limit=limit)) for part in self._parts]
            rows = merge(self._mode, opened, lambda part, cycle: iter(()))
        for number, row in zip(numbers, rows, strict=False):
            yield number, tree_unflatten(row, self._spec)

    def _cycle(self, part: EvaluationSource, first: int, epoch: int) -> Iterator[Any]:
        length = part.len_batches() or 1
        for begin in itertools.count(0, length):
            yield from self._batches(part.start_from((first - begin) % self.size, epoch=epoch))

    @staticmethod
    def _batches(numbered: NumberedBatches) -> Iterator[Any]:
        for _, batch in numbered:
            yield batch
