"""Evaluation data of one rank: the user's loader, read so that every sample is evaluated exactly once over all ranks.

Batch i of the one-process order is evaluated entirely by rank ``i % size``. No batch is split, padded or dropped, so
the sums over ranks equal those of one process.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ..core.position_rng import mix_seed
from .common_stream import FirstBatch
from .dataloader import (
    Passes,
    check_loader,
    distributed_samplers,
    is_map_style,
    iterate_copy,
    order_of,
    private_copy,
    seed_of,
)
from .epochs import pass_epoch_to
from .orders import NaturalOrder, length_of
from .samplers import EvaluationSampler

NumberedBatches = Iterator[tuple[int, Any]]


class EvaluationSource(ABC):
    """The data source of the evaluation loop. Batches and limits are counted in the one-process order."""

    name: str
    rank: int
    size: int
    counts_exactly: bool = False
    """Whether ``len_local``, if known, is exactly the number of batches that ``start`` yields."""

    @abstractmethod
    def len_batches(self) -> int | None:
        """Return the number of batches of all ranks together, or None if unknown."""

    def len_local(self, limit: int | None = None) -> int | None:
        """Return the number of this rank's batches among the first ``limit``.

        If the length is unknown, this is an upper bound, or None without a limit.
        """
        known = [count for count in (self.len_batches(), limit) if count is not None]
        return len(range(self.rank, min(known), self.size)) if known else None

    def start(self, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        """Yield (number in the one-process order, batch) for this rank's batches among the first ``limit``."""
        return self.start_from(self.rank, epoch=epoch, limit=limit)

    def first_batches(self) -> list[str | None]:
        """Return a fingerprint for each iterable that all ranks read in common: of its first batch, None before."""
        return []

    def record_indices(self) -> None:
        """Record the dataset indices of each batch from now on, where they are known."""

    def take_indices(self) -> list[Any] | None:
        """Return the dataset indices of the next batch of this rank, once for each batch; None if they are unknown."""
        return None

    @abstractmethod
    def start_from(self, first: int, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        """Yield every ``size``-th batch, starting with batch ``first``, regardless of the rank."""


class MapEvaluation(EvaluationSource):
    """A ``DataLoader`` over a map-style dataset: only this rank's batches are loaded."""

    counts_exactly = True

    def __init__(self, loader: DataLoader[Any], *, rank: int, size: int, seed: int, name: str) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._given = loader
        self._seed = seed_of(loader, seed)
        order, width, whole, drop_last = order_of(loader, self._seed)
        for sampler in distributed_samplers(loader):
            # A DistributedSampler would pad or drop samples to balance the ranks; read its dataset in order instead.
            order = NaturalOrder(sampler.dataset, self._seed, shuffle=sampler.shuffle)
        self._sampler = EvaluationSampler(
            loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
            order,
            width,
            drop_last=drop_last,
            whole=whole,
            seed=self._seed,
            seeded=loader.num_workers > 0,
        )
        self._loader = private_copy(loader, self._sampler, name)

    def len_batches(self) -> int | None:
        return self._sampler.length()

    def record_indices(self) -> None:
        # Batches of other loaders need not arrive one by one in the order in which the sampler yields them.
        if type(self._given).__iter__ is DataLoader.__iter__ and getattr(self._given, "in_order", True):
            self._sampler.records_indices = True

    def take_indices(self) -> list[Any] | None:
        return self._sampler.take_indices()

    def start_from(self, first: int, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        pass_epoch_to(self._given, epoch)
        self._sampler.read_from(first, self.size, limit)
        batches = iterate_copy(self._loader, self._sampler, mix_seed(self._seed, 0), self.name)
        return zip(itertools.count(first, self.size), batches)


class IterableEvaluation(EvaluationSource):
    """Any other iterable of batches: every rank reads all batches and drops those of other ranks."""

    def __init__(self, loader: Any, *, rank: int, size: int, seed: int, name: str) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._given = loader
        self._seed = seed_of(loader, seed)
        self._loader = private_copy(loader, None, name) if isinstance(loader, DataLoader) else loader
        self._passes = Passes(self._loader, name)
        self._first_batch = FirstBatch()

    def len_batches(self) -> int | None:
        return length_of(self._loader)

    def first_batches(self) -> list[str | None]:
        return [] if self.size == 1 else [self._first_batch.fingerprint]

    def start_from(self, first: int, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        pass_epoch_to(self._given, epoch)
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            self._loader.generator.manual_seed(mix_seed(self._seed, 0))
        batches = self._passes.begin()
        if self.size > 1:
            batches = self._first_batch.noted(batches)
        return itertools.islice(enumerate(batches), first, limit, self.size)


class UserSharded(EvaluationSource):
    """A loader that the user shards: all its batches are this rank's, numbered ``rank``, ``rank + size`` and so on.

    The user is then responsible for evaluating every sample once.
    """

    def __init__(self, whole: EvaluationSource, *, rank: int, size: int) -> None:
        """``whole``: a source that reads the loader as in a single process."""
        self.name, self.rank, self.size = whole.name, rank, size
        self._whole = whole

    def len_batches(self) -> int | None:
        own = self._whole.len_batches()
        return None if own is None else own * self.size

    def start_from(self, first: int, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        own_limit = None if limit is None else len(range(self.rank, limit, self.size))
        for number, batch in self._whole.start(epoch=epoch, limit=own_limit):
            yield number * self.size + self.rank, batch


def evaluation_source(
    loader: Any, *, rank: int, size: int, seed: int = 0, shard: bool = True, name: str
) -> EvaluationSource:
    """Return the source for an evaluation loader; see ``prepare_evaluation``."""
    check_loader(loader, name)
    kind = MapEvaluation if is_map_style(loader) else IterableEvaluation
    if shard and not (is_map_style(loader) and _shares_out_by_itself(loader)):
        return kind(loader, rank=rank, size=size, seed=seed, name=name)
    return UserSharded(IterableEvaluation(loader, rank=0, size=1, seed=seed, name=name), rank=rank, size=size)


def _shares_out_by_itself(loader: DataLoader[Any]) -> bool:
    # A plain DistributedSampler under plain batches is fully known and is replaced; any other sampler is retained.
    plain = type(loader.batch_sampler) in (BatchSampler, type(None))
    return any(not plain or type(sampler) is not DistributedSampler for sampler in distributed_samplers(loader))
