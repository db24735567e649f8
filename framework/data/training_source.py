"""Training data of one rank: the user's loader, read from any position.

The user's loader is not modified. A ``DataLoader`` is copied (shallowly) with another sampler and generator; any other
iterable is iterated. A loader that cannot be handled is refused with an error.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from torch.utils.data import DataLoader

from ..core.errors import CheckpointError, ConfigurationError
from ..core.position_rng import mix_seed
from ..distributed.data_parallel import ceil_div
from .dataloader import (
    Passes,
    check_loader,
    distributed_samplers,
    is_map_style,
    iterate_copy,
    order_of,
    private_copy,
    seed_of,
    skip,
    tell_epoch,
)
from .orders import length_of
from .samplers import TrainingSampler

Position = dict[str, Any]
"""The consumed part of an epoch, in JSON values."""

CONVERTED = "global_batches"
"""The key of a position from a checkpoint of another framework: batches per rank, with this run's batch size."""


@final
class NoBatch:
    """The type of ``NO_BATCH``."""

    def __repr__(self) -> str:
        return "NO_BATCH"


NO_BATCH: Final = NoBatch()
"""Yielded by a source if other ranks have a part of the global micro-batch and this rank has none."""


class TrainingSource(ABC):
    """The data source of the training loop. Batches are counted as global micro-batches: one on every rank.

    An epoch that is resumed on another number of ranks, or with another batch size, continues at the same sample. Its
    batches are then counted from ``batches_before(position)``, in the present layout.
    """

    name: str
    keeps_state: bool = False
    """Whether the user's loader or dataset is stateful, so that a resumed run need not read consumed batches again."""
    started: bool = False
    """Whether an epoch was started in this process."""
    _began_at: Position | None = None

    def stop_keeping_state(self) -> None:
        """Save no state of the loader any more: it holds values that a checkpoint cannot hold."""
        self.keeps_state = False

    def __init__(self) -> None:
        self.announce: Callable[[str], None] = _say_nothing

    def announce_by(self, announce: Callable[[str], None]) -> None:
        """Call ``announce`` with messages for the console about operations that take long."""
        self.announce = announce

    @property
    def micro_batch_size(self) -> int | None:
        """The number of samples in a full micro-batch on one rank, or None if unknown."""
        return None

    @abstractmethod
    def len_batches(self, position: Position | None = None) -> int | None:
        """Return the number of batches in an epoch, those before ``position`` included, or None if unknown."""

    @abstractmethod
    def batches_before(self, position: Position | None) -> int:
        """Return the number of batches that ``position`` counts as consumed."""

    @abstractmethod
    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        """Return the batches of ``start``."""

    def state_after(self, batches: int | None) -> Any:
        """Return the state of a stateful loader or dataset after ``batches`` batches of the epoch, else None.

        With ``batches=None``, return the state between two epochs.
        """
        return None

    def restore(self, states: Sequence[Any], own: bool) -> None:
        """Restore, for the next ``start``, states from ``state_after``: this rank's (``own``), or those of all former
        ranks."""

    @abstractmethod
    def position_from(self, began_at: Position | None, batches: int) -> Position:
        """Return the position after ``batches`` batches of an epoch that was started at ``began_at``."""

    def described(self) -> str | None:
        """Return a human-readable description of an epoch, or None if unknown; the same for any number of ranks."""
        return None

    def start(self, epoch: int, position: Position | None = None) -> Iterator[Any]:
        """Yield this rank's batches, or ``NO_BATCH`` if it has none, beginning at ``position``.

        Batches before the position that must be skipped are read before this method returns.
        """
        self._began_at, self.started = position, True
        return self.open(epoch, position)

    def len_batches_now(self) -> int | None:
        """Return the number of batches in the epoch that was started last, or None if unknown."""
        return self.len_batches(self._began_at)

    def position_after(self, batches: int) -> Position:
        """Return the position after ``batches`` batches of the epoch that was started last."""
        return self.position_from(self._began_at, batches)


class CountedSource(TrainingSource):
    """A source whose position is one number: the consumed items of the one-process order."""

    def __init__(self, name: str, unit: str, span: int) -> None:
        """``unit``: the kind of item, "samples" or "batches"; ``span``: the number of items in a global micro-batch."""
        super().__init__()
        self.name = name
        self.unit = unit
        self.span = span

    def batches_before(self, position: Position | None) -> int:
        return ceil_div(self.items_before(position), self.span)

    def items_before(self, position: Position | None) -> int:
        """Return the items that ``position`` counts as consumed.

        Raises:
            CheckpointError: the position counts another unit.
        """
        if position is None:
            return 0
        if CONVERTED in position:
            return int(position[CONVERTED]) * self.span
        if self.unit not in position:
            raise CheckpointError(
                f"{self.name} was checkpointed at {position}, but the loader given now counts {self.unit}: "
                "a run must resume with the kind of loader that it was started with."
            )
        return int(position[self.unit])

    def position_from(self, began_at: Position | None, batches: int) -> Position:
        first = self.items_before(began_at)
        items = first + (batches - ceil_div(first, self.span)) * self.span
        total = self.total_items()
        return {self.unit: items if total is None else min(items, max(total, first))}

    def total_items(self) -> int | None:
        """Return the number of items in an epoch, or None if it is not known exactly."""
        return None


class MapSource(CountedSource):
    """A ``DataLoader`` over a map-style dataset: this rank's part of every global micro-batch."""

    def __init__(self, loader: DataLoader[Any], sampler: TrainingSampler, *, world: int, seed: int, name: str) -> None:
        """``world``: the number of ranks, even if the user shards the data and the sampler covers only one rank."""
        super().__init__(name, "batches" if sampler.whole else "samples", sampler.width * world)
        self._given = loader
        self._sampler = sampler
        self._seed = seed
        self._shares = world // sampler.size
        self._loader = private_copy(loader, sampler, name)

    @property
    def micro_batch_size(self) -> int | None:
        return getattr(self._given, "batch_size", None) if self._sampler.whole else self._sampler.width

    def len_batches(self, position: Position | None = None) -> int | None:
        items = self.items_before(position)
        left = self._sampler.length(items // self._shares)
        return None if left is None else ceil_div(items, self.span) + left

    def total_items(self) -> int | None:
        if self._shares > 1:
            return None  # the user shards, and ranks may have different numbers of samples
        return self._sampler.order.length()

    def described(self) -> str | None:
        total = self.total_items()
        return None if total is None else f"{total} {self.unit}, {self._sampler.order.described()}"

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        self._sampler.read_from(self.items_before(position) // self._shares, epoch)
        tell_epoch(self._given, epoch)
        batches = iterate_copy(self._loader, self._sampler, mix_seed(self._seed, epoch), self.name)
        return itertools.chain(batches, self._rest()) if self._sampler.size > 1 else batches

    def _rest(self) -> Iterator[Any]:
        # Runs after the loader is exhausted: only then does the sampler know whether this rank has a part of the last
        # batch.
        if self._sampler.left_out:
            yield NO_BATCH


class IterableSource(CountedSource):
    """Any other iterable of batches: batch i belongs to rank ``i % size``, or to every rank if not sharded."""

    def __init__(self, loader: Any, *, rank: int, size: int, seed: int, shard: bool, name: str) -> None:
        super().__init__(name, "batches", size)
        self._given = loader
        self._seed = seed_of(loader, seed)
        self._rank, self._size = (rank, size) if shard else (0, 1)
        self._shares = size // self._size
        self._loader = private_copy(loader, None, name) if isinstance(loader, DataLoader) else loader
        self._passes = Passes(self._loader, name)
        self._stateful = stateful_part(self._loader)
        self.keeps_state = self._stateful is not None
        # The batches of the one-process order that were read in this epoch, and the state to start the next epoch from.
        self._read = 0
        self._finished = False
        self._kept: dict[str, Any] | None = None

    @property
    def micro_batch_size(self) -> int | None:
        size = getattr(self._given, "batch_size", None)
        return size if isinstance(size, int) else None

    def len_batches(self, position: Position | None = None) -> int | None:
        total = length_of(self._loader)
        if total is None:
            return None
        items = self.items_before(position)
        left = max(total - items // self._shares, 0)
        return ceil_div(items, self.span) + ceil_div(left, self._size)

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        tell_epoch(self._given, epoch)
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            self._loader.generator.manual_seed(mix_seed(self._seed, epoch))
        first = self.items_before(position) // self._shares
        batches = self._begin(first, position is None)
        if self._stateful is not None:
            batches = self._counted(batches)
        skip(batches, first - self._read, self.name, self.announce)
        return batches if self._size == 1 else every(batches, self._rank, self._size)

    def _begin(self, first: int, anew: bool) -> Iterator[Any]:
        """Return the batches from the loader's present position: its start, or a position up to batch ``first``."""
        kept, self._kept = self._kept, None
        self._read, self._finished = 0, False
        if kept is None or self._stateful is None or (kept["read"] > first and not anew):
            return self._passes.begin()
        self._stateful.load_state_dict(kept["state"])
        if not anew:
            self._read, self._finished = kept["read"], kept["finished"]
            if self._finished:
                # The loader would start again.
                return iter(())
        elif self._stateful is self._loader and not kept["finished"]:
            # Exhaust the rest of the previous epoch, which the loader would otherwise continue with.
            self._passes.begin()
        return self._passes.begin()

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._read += 1
            yield batch
        self._finished = True

    def state_after(self, batches: int | None) -> Any:
        if self._stateful is None or not self.keeps_state or not self.started or self._kept is not None:
            return self._kept
        if batches is not None and self._read > int(self.position_after(batches)["batches"]) // self._shares:
            return None
        return {"read": self._read, "finished": self._finished, "state": self._stateful.state_dict()}

    def restore(self, states: Sequence[Any], own: bool) -> None:
        if own or self._shares == 1:
            # The former ranks read the same stream, each up to its own part; the state furthest ahead avoids most
            # reading.
            told = [state for state in states if state is not None]
            self._kept = max(told, key=lambda state: int(state["read"]), default=None)


def _say_nothing(text: str) -> None:
    """Ignore a message: the default of ``announce_by``."""


def stateful_part(loader: Any) -> Any:
    """Return the stateful object of a loader: itself, or its dataset if that is read in this process; else None."""
    if tells_state(loader):
        return loader
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and tells_state(loader.dataset):
        return loader.dataset
    return None


def tells_state(thing: Any) -> bool:
    """Whether ``thing`` has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def every(batches: Iterator[Any], rank: int, size: int) -> Iterator[Any]:
    """Yield every ``size``-th batch, starting with batch ``rank``, or ``NO_BATCH`` if the last round has none."""
    while True:
        for place in range(size):
            try:
                batch = next(batches)
            except StopIteration:
                if 0 < place <= rank:
                    yield NO_BATCH
                return
            if place == rank:
                yield batch
            del batch


def training_source(
    loader: Any, *, rank: int, size: int, seed: int, shard: bool = True, sequential: bool = False, name: str
) -> TrainingSource:
    """Return the source for a training loader; see ``prepare_training``."""
    check_loader(loader, name)
    source: TrainingSource
    if is_map_style(loader):
        source = _map_source(loader, rank=rank, size=size, seed=seed, shard=shard, sequential=sequential, name=name)
    else:
        source = IterableSource(loader, rank=rank, size=size, seed=seed, shard=shard, name=name)
    if source.len_batches() == 0:
        raise ConfigurationError(
            f"{name} yields no batch on {size} rank(s)"
            + (", and its drop_last drops a short global batch" if getattr(loader, "drop_last", False) else "")
            + "; training needs at least one: check the dataset's length and the batch size."
        )
    return source


def _map_source(
    loader: DataLoader[Any], *, rank: int, size: int, seed: int, shard: bool, sequential: bool, name: str
) -> MapSource:
    seed = seed_of(loader, seed)
    shared_out = distributed_samplers(loader)
    for each in shared_out:
        if each.num_replicas != size:
            raise ConfigurationError(
                f"{name} has a DistributedSampler with num_replicas={each.num_replicas}, but there are {size} rank(s): "
                "remove the sampler; phalanx shards the samples automatically."
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
