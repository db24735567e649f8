"""Training data from a ``DataLoader`` over a map-style dataset: each rank reads its part of every global micro-batch.

The user's loader is not modified: it is copied (shallowly) with another sampler and generator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ..core.errors import ConfigurationError
from ..core.position_rng import mix_seed
from ..core.wording import counted
from ..distributed.data_parallel import ceil_div
from .dataloader import distributed_samplers, iterate_copy, order_of, private_copy, seed_of
from .epochs import pass_epoch_to
from .samplers import TrainingSampler
from .training_source import NO_BATCH, CountedSource, Position


class MapSource(CountedSource):
    """A ``DataLoader`` over a map-style dataset: this rank's part of every global micro-batch."""

    def __init__(self, loader: DataLoader[Any], sampler: TrainingSampler, *, world: int, seed: int, name: str) -> None:
        """``world``: the number of ranks, even if the user shards the data and the sampler covers only one rank."""
        super().__init__(name, "batches" if sampler.whole else "samples", sampler.span * (world // sampler.size))
        self._given = loader
        self._sampler = sampler
        self._seed = seed
        self._user_shards = world // sampler.size
        """The number of shards that the user's sampler makes of the data: one for each rank, or 1."""
        self._loader = private_copy(loader, sampler, name)
        # A DataLoader yields one batch for each item of its sampler. A class with an iteration of its own may not.
        self._reads_all = type(loader).__iter__ is DataLoader.__iter__

    @property
    def micro_batch_size(self) -> int | None:
        return getattr(self._given, "batch_size", None) if self._sampler.whole else self._sampler.width

    def len_batches(self, position: Position | None = None) -> int | None:
        items = self.items_before(position)
        left = self._sampler.length(items // self._user_shards)
        return None if left is None else ceil_div(items, self.span) + left

    def total_items(self) -> int | None:
        if self._user_shards > 1:
            return None  # the user shards, and ranks may have different numbers of samples
        return self._sampler.order.length()

    def described(self) -> str | None:
        total = self.total_items()
        return None if total is None else f"{total} {self.unit}, {self._sampler.order.described()}"

    def layout(self) -> dict[str, Any]:
        ranks = self._sampler.size if self._user_shards == 1 else None
        return {**super().layout(), "ranks": ranks, "order": self._sampler.order.layout()}

    def assured_batches(self) -> int:
        own = self._sampler.own_batches
        return 0 if own is None or not self._reads_all else self.batches_before(self._began_at) + own

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        self._sampler.read_from(self.items_before(position) // self._user_shards, epoch)
        pass_epoch_to(self._given, epoch)
        batches = iterate_copy(self._loader, self._sampler, mix_seed(self._seed, epoch), self.name)
        return itertools.chain(batches, self._rest()) if self._sampler.size > 1 else batches

    def _rest(self) -> Iterator[Any]:
        # Runs after the loader is exhausted: only then does the sampler know whether this rank has a part of the last
        # batch.
        if self._sampler.has_no_last_part:
            yield NO_BATCH


def map_source(
    loader: DataLoader[Any], *, rank: int, size: int, seed: int, shard: bool, sequential: bool, name: str
) -> MapSource:
    """Return the source for a ``DataLoader`` over a map-style dataset; see ``prepare_training``."""
    seed = seed_of(loader, seed)
    shared_out = distributed_samplers(loader)
    for each in shared_out:
        if each.num_replicas != size:
            raise ConfigurationError(
                f"{name} has a DistributedSampler with num_replicas={each.num_replicas}, but the data is for "
                f"{counted(size, 'rank')}: remove the sampler; phalanx shards the samples automatically."
            )
    shard = shard and not shared_out
    # Not mixed with the rank: a sampler that shards the samples needs the same order on all ranks.
    order, width, whole, drop_last = order_of(loader, seed, sequential)
    seed = seed if shard else mix_seed(seed, rank)
    sampler = TrainingSampler(
        loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
        order,
        width,
        rank=rank if shard else 0,
        size=size if shard else 1,
        drop_last=drop_last,
        whole=whole,
        seed=seed,
        seeded=loader.num_workers > 0,
    )
    return MapSource(loader, sampler, world=size, seed=seed, name=name)
