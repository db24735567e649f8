"""``FabricLoader``: a user's loader, sharded over ranks in even rounds, on the device, resumable; and ``Reading``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError, ConfigurationError
from ..core.proxy import Wrapper
from ..data.combined_source import prepare_training
from ..data.dataloader import copy_with, distributed_samplers, is_map_style
from ..data.iterable_source import IterableSource
from ..data.rounds import (
    Rounds,
    SplitBatches,
    asked_rounds,
    dispatched_rounds,
    holders_of_last,
    known_rounds,
    local_rounds,
)
from ..data.training_source import NO_BATCH, Position, TrainingSource
from ..distributed.data_parallel import DataRanks, ceil_div
from ..distributed.world import World


@dataclass(frozen=True)
class Sharing:
    """Options for sharding a loader; see ``Fabric.setup_dataloaders``."""

    shard: bool = True
    split: bool = False
    dispatch: bool = False
    even: bool = True


@dataclass
class _Passes:
    """The position of the current pass and of the next, shared by a loader and its views."""

    next_epoch: int = 0
    next_position: Position | None = None
    epoch: int = 0
    consumed: int = 0
    under_way: bool = False


class FabricLoader(Wrapper):
    """Yields this rank's batches. Attributes that it lacks are those of the original loader.

    With even sharding each rank yields the same number of batches: a rank without samples for the last round repeats
    its last batch as a *filler batch*. Its loss has weight 0, and ``gather_for_metrics`` drops its rows. Each pass is a
    new epoch of the permutation.

    Attributes:
        epoch: The epoch of the current pass, or of the last one.
        end: Whether the last batch yielded ends its pass; the same on all ranks if sharding is even.
        filler: Whether the last batch yielded is a filler batch.
        share: The weight of this batch's loss in the mean over ranks: 0 for a filler batch, 1 if all ranks have data,
            more than 1 if some have none.
        count: The number of batches yielded in this pass.
        is_along: Whether the last batch was read while a loader that was started later was being read.
    """

    def __init__(
        self,
        given: Any,
        world: World,
        seed: int,
        sharing: Sharing,
        move: Callable[[Any], Any] | None,
        reading: Reading,
        name: str,
    ) -> None:
        super().__init__(given)
        self.epoch = 0
        self.end = False
        self.filler = False
        self.share = 1.0
        self.count = 0
        self.is_along = False
        self._world = ranks = DataRanks(world)
        self._sharing = sharing
        self._move = move
        self._reading = reading
        self._name = name
        self._passes = _Passes()
        self._skipped = 0
        self._may_fill = False
        self._source = _source(given, ranks, seed, sharing, name)

    def __repr__(self) -> str:
        return f"FabricLoader({self._original!r})"

    def __len__(self) -> int:
        total = self._source.len_batches()
        if total is None:
            raise TypeError(f"object of type {type(self._original).__name__!r} has no len()")
        if self._sharing.dispatch and not self._sharing.split:
            total = ceil_div(total, self._world.size)
        elif not self._is_even and self._sharing.shard:
            holders = holders_of_last(self._source, self._original, None, self._world.size)
            total -= holders is not None and self._world.rank not in holders
        return max(total - self._skipped, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._passes.next_epoch, self._passes.next_position = epoch, None

    def skipping(self, batches: int) -> FabricLoader:
        """Return a view whose passes begin after the first ``batches``, which are not read if that can be avoided."""
        view = copy.copy(self)
        view._skipped = self._skipped + batches
        return view

    # ---- a pass ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        passes = self._passes
        self.epoch = passes.epoch = passes.next_epoch
        position = passes.next_position
        passes.next_epoch, passes.next_position = passes.epoch + 1, None
        if position is None and self._skipped:
            position = self._source.position_from(None, self._skipped * self._reads_a_round)
        rounds = self._rounds(passes.epoch, position)
        passes.consumed = self._source.batches_before(position)
        passes.under_way = True
        self._reading.loaders.append(self)
        try:
            yield from self._filled(rounds)
        finally:
            self._reading.loaders.remove(self)
            passes.under_way = False
            self.end = self.filler = False
            self.share = 1.0

    def _filled(self, rounds: Rounds) -> Iterator[Any]:
        world, previous = self._world, NO_BATCH
        for number, (batch, holders, last) in enumerate(rounds):
            partial = self._is_even and len(holders) < world.size
            self.filler = batch is NO_BATCH
            if partial and number == 0:
                spare = world.broadcast_object(batch if world.rank == holders[0] else None, holders[0])
                batch = spare if self.filler else batch
            elif self.filler:
                batch = previous
            # The previous batch is released before the loop works on this one.
            previous = batch if self._may_fill and not last else NO_BATCH
            self.end = last
            self.count, self.is_along = number + 1, number > 0 and self._reading.current is not self
            self.share = 0.0 if self.filler else world.size / len(holders) if partial else 1.0
            self._passes.consumed += self._reads_a_round
            yield self._move(batch) if self._move is not None else batch

    def _rounds(self, epoch: int, position: Position | None) -> Rounds:
        world, source, sharing = self._world, self._source, self._sharing
        batches = source.start(epoch, position)
        self._may_fill = False
        if sharing.dispatch and world.size > 1:
            self._may_fill = True
            return dispatched_rounds(batches, world, sharing.split)
        total = source.len_batches(position)
        rounds = None if total is None else total - source.batches_before(position)
        if not self._is_even or world.size == 1:
            return local_rounds(batches, rounds, world.rank)
        if isinstance(source, IterableSource) and sharing.split:
            # Whether the last batch has a row for each rank is known only after reading it.
            holders = None
        elif sharing.shard:
            holders = holders_of_last(source, self._original, position, world.size)
        else:
            agreed = all(other == rounds for other in world.all_gather_object(rounds))
            holders = range(world.size) if agreed else None
        if rounds is None or holders is None:
            self._may_fill = True
            return asked_rounds(batches, world)
        self._may_fill = len(holders) < world.size
        return known_rounds(batches, rounds, holders, world.size)

    @property
    def _is_even(self) -> bool:
        return self._sharing.even or self._reading.joined

    @property
    def _reads_a_round(self) -> int:
        """The number of the source's batches in a round."""
        return self._world.size if self._sharing.dispatch and not self._sharing.split else 1

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position: in a pass, by the number of batches consumed, or before one."""
        passes = self._passes
        if not passes.under_way:
            return {"epoch": passes.next_epoch, "position": passes.next_position}
        length = self._source.len_batches()
        consumed = passes.consumed if length is None else min(passes.consumed, length)
        return {"epoch": passes.epoch, "position": self._source.position_after(consumed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass continue at the position that ``state_dict`` returned.

        Raises:
            CheckpointError: the state is not that of a loader.
        """
        if not {"epoch", "position"} <= set(state):
            raise CheckpointError(f"{self._name}: {state!r} is not the position of a loader.")
        self._passes.next_epoch, self._passes.next_position = int(state["epoch"]), state["position"]


@dataclass
class Reading:
    """The loaders of a Fabric that are being iterated over, the innermost last."""

    loaders: list[FabricLoader] = field(default_factory=list)
    joined: bool = False

    @property
    def current(self) -> FabricLoader | None:
        """The innermost loader, if any."""
        return self.loaders[-1] if self.loaders else None

    @property
    def together(self) -> list[FabricLoader]:
        """The innermost loader, and those whose batches are read along with its own, as by ``zip(first, second)``."""
        if len(self.loaders) < 2:
            return self.loaders
        inner = self.loaders[-1]
        return [*(one for one in self.loaders[:-1] if one.is_along and one.count == inner.count), inner]

    @property
    def end(self) -> bool:
        """Whether one of them has yielded its last batch, so that the loop ends after this round."""
        return any(one.end for one in self.together)

    @property
    def filler(self) -> bool:
        """Whether one of them has no more data for this rank: on one process the loop would have ended before."""
        return any(one.filler for one in self.together)

    @property
    def share(self) -> float:
        """The weight of a loss of this round in the mean over ranks."""
        return 0.0 if self.filler else max((one.share for one in self.together), default=1.0)

    @contextmanager
    def evened(self) -> Generator[None, None, None]:
        """Make all loaders even inside, so that ranks without data continue with filler batches."""
        before, self.joined = self.joined, True
        try:
            yield
        finally:
            self.joined = before


class SkippedBatches(Wrapper):
    """A loader that was not set up, without its first batches."""

    def __init__(self, loader: Any, batches: int) -> None:
        super().__init__(loader)
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._original):
            if number >= self._batches:
                yield batch

    def __len__(self) -> int:
        return max(len(self._original) - self._batches, 0)


def _source(given: Any, world: DataRanks, seed: int, sharing: Sharing, name: str) -> TrainingSource:
    rank, size, shard = world.rank, world.size, sharing.shard
    if sharing.dispatch and size > 1:
        return prepare_training(given, rank=0, size=1, seed=seed, name=name)
    if sharing.split and size > 1:
        narrow = _narrowed(given, size, name)
        if narrow is not None:
            given = narrow
        else:
            given, shard = SplitBatches(given, rank, size), False
    return prepare_training(given, rank=rank, size=size, seed=seed, shard=shard, name=name)


def _narrowed(given: Any, size: int, name: str) -> Any:
    """Return a copy of a loader that reads a rank's part of each batch, or None if batches must be read and split."""
    if not is_map_style(given) or type(given.batch_sampler) is not BatchSampler or distributed_samplers(given):
        return None
    sampler = given.batch_sampler
    if sampler.batch_size % size:
        raise ConfigurationError(
            f"{name} has batch_size={sampler.batch_size}, which split_batches shares out over {size} ranks: give a "
            "multiple of the number of ranks."
        )
    size_of_part = sampler.batch_size // size
    part = BatchSampler(sampler.sampler, size_of_part, sampler.drop_last)
    return copy_with(given, {"batch_sampler": part, "batch_size": size_of_part})


@names_arguments
def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without its first batches, to resume in the middle of an epoch."""
    if isinstance(dataloader, FabricLoader):
        return dataloader.skipping(num_batches)
    return SkippedBatches(dataloader, num_batches)
