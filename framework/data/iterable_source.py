"""Training data from any iterable of batches, stateful loaders and datasets included.

The user's loader is not modified: a ``DataLoader`` is copied (shallowly) with another generator, any other iterable is
used as given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..core.position_rng import mix_seed
from ..distributed.data_parallel import ceil_div
from .common_stream import FirstBatch
from .dataloader import Passes, private_copy, seed_of, skip
from .epochs import pass_epoch_to
from .orders import length_of
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
        self._user_shards = size // self._size
        """The number of shards that the loader itself makes of the data: one for each rank, or 1."""
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
        self._is_next_pass_empty = False
        """Whether the loader was restored at the end of an epoch, and not read since: its next pass may be the empty
        rest of that epoch."""
        self._restored: dict[str, Any] | None = None
        """The state of a checkpoint, which the next ``start`` begins from."""
        # Of a loader that shards itself, and is resumed on another number of ranks, at most one is true.
        self._is_elastic = False
        """Whether the loader continues from a state of another number of ranks."""
        self._is_resharded = False
        """Whether no state can be used, so that each rank skips its part of the consumed batches."""

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
        if self._is_resharded:
            self.announce(
                f"{self.name} shards itself, and the number of ranks has changed: each rank continues after its part "
                "of the consumed batches. These are the samples of the interrupted run only if the dataset distributes "
                "single samples over the ranks."
            )
        elif former is not None and (change := stream_change(self.name, former, self._identity())):
            self.announce(change)

    def first_batches(self) -> list[str | None]:
        return [] if self._size == 1 else [self._first_batch.fingerprint]

    def _begin(self, first: int, is_new_epoch: bool) -> Iterator[Any]:
        """Return an iterator from the restored state if that is of use, else from the start of the loader.

        The state is of use in the epoch that it was saved in, if it is at or before batch ``first``, and in the next
        epoch, whose order it may determine. Sets ``_read`` to the iterator's position in the epoch.
        """
        restored, self._restored = self._restored, None
        self._read, self._finished = 0, False
        if restored is None or self._stateful is None or "state" not in restored:
            return self._begin_pass()
        if not is_new_epoch and restored["read"] > first:
            return self._begin_pass()
        self._stateful.load_state_dict(restored["state"])
        total = length_of(self._loader)
        has_ended = restored["finished"] or (total is not None and restored["read"] >= total)
        self._is_next_pass_empty = has_ended
        if is_new_epoch:
            if self._stateful is self._loader and not has_ended:
                # Begin and drop the interrupted pass, which the loader would otherwise continue.
                self._begin_pass()
            return self._begin_pass()
        self._read, self._finished = restored["read"], has_ended
        # At its end the loader would start again.
        return iter(()) if has_ended else self._begin_pass()

    def _begin_pass(self) -> Iterator[Any]:
        batches = self._passes.begin()
        may_be_empty, self._is_next_pass_empty = self._is_next_pass_empty, False
        if not may_be_empty:
            return batches
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
        return ceil_div(items, self._user_shards) if self._is_elastic else items // self._user_shards

    def _identity(self) -> dict[str, Any]:
        """Return the values by which a later run recognizes the stream of an epoch, as JSON values."""
        # One worker yields the batches in the order of the rank's own process.
        return {"workers": max(self._workers, 1), "first_batch": self._opening.fingerprint}

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
            self._is_resharded = True


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


def stream_change(name: str, former: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a message if a stream is not the one that the interrupted run has read, else None."""
    workers, first_batch = former.get("workers", now["workers"]), former.get("first_batch")
    if workers != now["workers"]:
        return (
            f"The interrupted run read {name} with num_workers={workers}, and this one has "
            f"num_workers={now['workers']}. Workers change the order of an iterable dataset, so some samples are "
            "repeated and others are never read: resume with the same number of workers."
        )
    if None not in (first_batch, now["first_batch"]) and first_batch != now["first_batch"]:
        return (
            f"{name} does not yield the batches again that the interrupted run has consumed: the first batch of this "
            "epoch differs. Some samples are repeated and others are never read: give its shuffling a seed. Nothing is "
            "lost if only random augmentation differs."
        )
    return None
