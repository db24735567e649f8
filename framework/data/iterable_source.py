"""Training data from any iterable of batches, stateful loaders and datasets included.

The user's loader is not modified: a ``DataLoader`` is copied (shallowly) with another generator, any other iterable is
used as given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..core.position_rng import mix_seed
from ..distributed.data_parallel import ceil_div
from .common_stream import FirstBatch
from .dataloader import Passes, private_copy, seed_of, skip
from .epochs import pass_epoch_to
from .orders import length_of
from .repeated_stream import stream_change, stream_identity
from .stateful_loader import counts_over_ranks, stateful_part
from .training_source import NO_BATCH, CountedSource, Position


class IterableSource(CountedSource):
    """Training source for an iterable that is not a map-style ``DataLoader``.

    Batch i belongs to rank ``i % size``, or to every rank if not sharded.

    Args:
        loader: the user's iterable of batches.
        rank: this data rank (ranks that read the same data count as one).
        size: the number of data ranks.
        seed: the seed of the loader's generator, unless the loader has a generator of its own.
        shard: False if every rank reads all batches.
        name: the loader in messages.
    """

    def __init__(self, loader: Any, *, rank: int, size: int, seed: int, shard: bool, name: str) -> None:
        super().__init__(name, "batches", size)
        self._given = loader
        self._seed = seed_of(loader, seed)
        self._shards_itself = not shard
        self._rank, self._size = (rank, size) if shard else (0, 1)
        self._readers_per_batch = size // self._size
        self._loader = private_copy(loader, None, name) if isinstance(loader, DataLoader) else loader
        self._passes = Passes(self._loader, name)
        self._stateful = stateful_part(self._loader)
        self.keeps_state = self._stateful is not None
        self._workers = getattr(loader, "num_workers", 0)
        self._first_batch = FirstBatch()
        """The first batch that this process has read."""
        self._opening = FirstBatch()
        """The first batch of this epoch, read by this run or by the one that it resumes."""
        self._read = 0
        """Batches of the one-process order that were read in this epoch."""
        self._finished = False
        """Whether this epoch was read to its end."""
        self._at_end = False
        """Whether the loader was restored at the end of an epoch, and not read since."""
        self._restored: dict[str, Any] | None = None
        """The state of a checkpoint, which the next ``start`` begins from."""
        self._other_ranks = False
        """Whether a loader that shards itself is resumed on another number of ranks, from no state of its own."""
        self._is_elastic = False
        """Whether the restored state is that of another number of ranks, and the loader continues from it."""

    @property
    def micro_batch_size(self) -> int | None:
        size = getattr(self._given, "batch_size", None)
        return size if isinstance(size, int) else None

    def len_batches(self, position: Position | None = None) -> int | None:
        total = length_of(self._loader)
        if total is None:
            return None
        items = self.items_before(position)
        left = max(total - self._batches_in(items), 0)
        return ceil_div(items, self.span) + ceil_div(left, self._size)

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        pass_epoch_to(self._given, epoch)
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            self._loader.generator.manual_seed(mix_seed(self._seed, epoch))
        first = self._batches_in(self.items_before(position))
        former = None if position is None else self._restored
        batches = self._begin(first, position is None)
        # The first batch is known only if the epoch is read from its start.
        continues = self._read > 0
        self._opening = FirstBatch(former.get("first_batch") if former is not None and continues else None)
        if self._stateful is not None:
            batches = self._counted(batches)
        if not hasattr(type(self._loader), "__getitem__"):
            # A sequence yields the same batches again.
            batches = self._opening.noted(batches)
        skip(batches, first - self._read, self.name, self.announce)
        if first > 0 and not continues:
            self._compare(former)
        if self._size == 1:
            return batches
        return _round_robin(self._first_batch.noted(batches), self._rank, self._size)

    def _compare(self, former: dict[str, Any] | None) -> None:
        """Report a stream whose consumed batches were read again, if they are not those of the interrupted run."""
        if self._other_ranks:
            self.announce(
                f"{self.name} shards itself, and the number of ranks has changed: each rank continues after its part "
                "of the consumed batches. These are the samples of the interrupted run only if the dataset distributes "
                "single samples over the ranks."
            )
        elif former is not None and (change := stream_change(self.name, former, self._identity())):
            self.announce(change)

    def first_batches(self) -> list[str | None]:
        return [] if self._size == 1 else [self._first_batch.fingerprint]

    def _begin(self, first: int, new_epoch: bool) -> Iterator[Any]:
        """Return an iterator from the restored state if that is at or before batch ``first``, else from the start.

        Sets ``_read`` to the iterator's position.
        """
        restored, self._restored = self._restored, None
        self._read, self._finished = 0, False
        usable = restored is not None and "state" in restored and (restored["read"] <= first or new_epoch)
        if restored is None or self._stateful is None or not usable:
            return self._pass()
        self._stateful.load_state_dict(restored["state"])
        total = length_of(self._loader)
        self._at_end = restored["finished"] or (total is not None and restored["read"] >= total)
        if not new_epoch:
            self._read, self._finished = restored["read"], self._at_end
            # At its end the loader would start again.
            return iter(()) if self._at_end else self._pass()
        if self._stateful is self._loader and not self._at_end:
            # Begin and drop the interrupted pass, which the loader would otherwise continue.
            self._pass()
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        batches = self._passes.begin()
        at_end, self._at_end = self._at_end, False
        if not at_end:
            return batches
        # The first pass of a loader that was restored at the end of an epoch may be the empty rest of that epoch.
        for batch in batches:
            return itertools.chain([batch], batches)
        return self._passes.begin()

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._read += 1
            yield batch
        self._finished = True

    def state_after(self, batches: int | None) -> Any:
        if not self.started or self._restored is not None:
            return self._restored
        if self._stateful is None or not self.keeps_state or self._is_ahead_of(batches):
            return None if batches is None or self._opening.fingerprint is None else self._identity()
        state = {"read": self._read, "finished": self._finished, "state": self._stateful.state_dict()}
        return {**self._identity(), **state}

    def _is_ahead_of(self, batches: int | None) -> bool:
        if batches is None:
            return False
        return self._read > self._batches_in(int(self.position_after(batches)["batches"]))

    def _batches_in(self, items: int) -> int:
        """Return how many batches of this loader are among the consumed ones of all ranks.

        Rounded down, so that a loader that shards itself repeats batches of an uneven rest and loses none. One that
        distributes the rest itself has begun another round.
        """
        return ceil_div(items, self._readers_per_batch) if self._is_elastic else items // self._readers_per_batch

    def _identity(self) -> dict[str, Any]:
        return stream_identity(self._workers, self._opening.fingerprint)

    def restore(self, states: Sequence[Any], own: bool) -> None:
        if own or not self._shards_itself:
            # The former ranks read the same stream, each up to its own part; the state furthest ahead avoids most
            # reading.
            known = [state for state in states if state is not None]
            self._restored = max(known, key=lambda state: int(state.get("read", -1)), default=None)
        elif states and self._stateful is self._loader and all(map(counts_over_ranks, states)):
            self._is_elastic = True
            self._restored = {**states[0], "read": self._batches_in(states[0]["read"] * len(states))}
        else:
            self._other_ranks = True


def _round_robin(batches: Iterator[Any], rank: int, size: int) -> Iterator[Any]:
    """Yield every ``size``-th batch, starting with batch ``rank``; ``NO_BATCH`` if only lower ranks have a batch in the
    last round."""
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
