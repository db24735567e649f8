"""Training data in global batches: one counts as one batch, and each rank processes its part of it in micro-batches.

The part of a rank does not depend on the size of the micro-batches, which may change between two global batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..core.errors import ConfigurationError, DataError
from ..core.global_batch import GlobalBatch, pieces_of
from ..distributed.data_parallel import ceil_div
from .combined_loader import is_collection
from .dataloader import check_loader, distributed_samplers, is_map_style, order_of, seed_of
from .map_source import MapSource
from .orders import LazyItems
from .samplers import TrainingSampler, rank_parts
from .training_source import NO_BATCH, Position


class GlobalBatchSampler(TrainingSampler):
    """A rank's part of every global batch, in micro-batches of ``width`` samples, the last of which may be smaller.

    Args:
        samples: the samples of a global batch.
        arguments: those of ``TrainingSampler``.
    """

    def __init__(self, *arguments: Any, samples: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._samples = samples
        self._drawn: deque[tuple[tuple[int, ...], int]] = deque()

    @property
    def span(self) -> int:
        """The number of samples in a global batch."""
        return self._samples

    def take_drawn(self) -> tuple[tuple[int, ...], int]:
        """Return the sizes of this rank's micro-batches of the earliest global batch not taken yet.

        Returns:
            The sizes, and the number of micro-batches of the rank that has the most.
        """
        return self._drawn.popleft()

    def _batches(self, items: Sequence[Any] | LazyItems, start: int, epoch: int) -> Iterator[Any]:
        # A new queue: an iteration that ended early leaves global batches that were read ahead.
        drawn = self._drawn = deque()
        width = self.width
        for count, begin, own in rank_parts(items, start, self.span, self.rank, self.size):
            if self.drop_last and count < self.span:
                return
            sizes = pieces_of(len(own), width)
            # The parts of the ranks differ by at most one sample.
            drawn.append((sizes, len(pieces_of(ceil_div(count, self.size), width))))
            if not sizes:
                self.has_no_last_part = True
                return
            place = 0
            for size in sizes:
                yield self._pack(own[place : place + size], start + begin + place, epoch)
                place += size
            start += self.span


class MicroBatchesOf:
    """The micro-batches of this rank's part of a global batch, read in turn while they are iterated over.

    Attributes:
        sizes: The samples of each.
        longest: The number of micro-batches of the rank that has the most.
    """

    def __init__(self, read: list[Any], coming: Iterator[Any], drawn: tuple[tuple[int, ...], int], name: str) -> None:
        """``read``: micro-batches that were read from ``coming`` before."""
        self.sizes, self.longest = drawn
        self._coming = coming
        self._read = deque(read)
        self._unread = len(self.sizes) - len(read)
        self._name = name

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        while self._read or self._unread:
            if not self._read:
                self._read_next()
            yield self._read.popleft()

    def read_all(self) -> Sequence[Any]:
        """Read those that were not read yet; return all that were not iterated over, without consuming them."""
        while self._unread:
            self._read_next()
        return self._read

    def _read_next(self) -> None:
        batch = next(self._coming, NO_BATCH)
        if batch is NO_BATCH:
            raise DataError(
                f"{self._name} ended within a global batch: make sure that its dataset and collate_fn raise no "
                "StopIteration."
            )
        self._unread -= 1
        self._read.append(batch)


class GlobalBatchSource(MapSource):
    """A ``DataLoader`` over a map-style dataset, in global batches: yields ``MicroBatchesOf`` each."""

    def __init__(self, loader: DataLoader[Any], sampler: GlobalBatchSampler, *, seed: int, name: str) -> None:
        super().__init__(loader, sampler, world=sampler.size, seed=seed, name=name)
        self._cut = sampler

    @property
    def micro_batch_size(self) -> int:
        return self._cut.width

    @property
    def global_batch_size(self) -> int:
        return self.span

    def cut_into(self, size: int) -> None:
        """Use micro-batches of this size from the next ``start`` on."""
        self._cut.width = size

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        return self._grouped(super().open(epoch, position))

    def _grouped(self, batches: Iterator[Any]) -> Iterator[MicroBatchesOf]:
        for first in batches:
            read = [] if first is NO_BATCH else [first]
            # The sampler has drawn the indices of a batch before the loader yields it.
            group = MicroBatchesOf(read, batches, self._cut.take_drawn(), self.name)
            yield group
            # Where the next global batch is read ahead, the rest of this one comes first.
            group.read_all()


def global_batch_source(
    loader: Any, given: GlobalBatch, *, rank: int, size: int, seed: int, shard: bool, sequential: bool, name: str
) -> GlobalBatchSource:
    """Return the source of global batches for a loader; see ``prepare_training`` for the arguments.

    Raises:
        ConfigurationError: the samples of the loader cannot be regrouped, or some ranks would have none.
    """
    if not is_collection(loader):
        check_loader(loader, name)
    if not is_map_style(loader):
        raise _refusal(given, name, "yields batches that cannot be regrouped")
    if distributed_samplers(loader) or not shard:
        raise ConfigurationError(
            f"{given} is distributed over the ranks by phalanx, but {name} shards its own samples: remove its "
            "DistributedSampler, and leave use_distributed_sampler=True."
        )
    seed = seed_of(loader, seed)
    order, width, whole, drop_last = order_of(loader, seed, sequential)
    if whole:
        kind = "has batch_size=None" if loader.batch_sampler is None else "has a batch_sampler, which sets the batches"
        raise _refusal(given, name, kind)
    given.check_ranks(size)
    if isinstance(given.micro_batch_size, int):
        width = given.micro_batch_size
    elif given.is_found:
        width = given.share(size)
    sampler = GlobalBatchSampler(
        loader.batch_sampler,
        order,
        min(width, given.share(size)),
        rank=rank,
        size=size,
        drop_last=drop_last,
        whole=False,
        seed=seed,
        seeded=loader.num_workers > 0,
        samples=given.samples,
    )
    return GlobalBatchSource(loader, sampler, seed=seed, name=name)


def _refusal(given: GlobalBatch, name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{given} takes the samples of one DataLoader over a map-style dataset with a batch_size, but {name} {reason}: "
        "set the batch size there and accumulate_grad_batches, and leave global_batch_size out."
    )
