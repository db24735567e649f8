"""Training data from any iterable of batches, stateful loaders and datasets included.

The user's loader is not modified: a ``DataLoader`` is copied (shallowly) with another generator, any other iterable is
used as given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..core.position_rng import mix_seed
from ..distributed.data_parallel import ceil_div
from .common_stream import FirstBatch
from .dataloader import Passes, pass_epoch_to, private_copy, seed_of, skip
from .orders import length_of
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
        self._rank, self._size = (rank, size) if shard else (0, 1)
        self._readers_per_batch = size // self._size
        self._loader = private_copy(loader, None, name) if isinstance(loader, DataLoader) else loader
        self._passes = Passes(self._loader, name)
        self._stateful = _stateful_part(self._loader)
        self.keeps_state = self._stateful is not None
        self._first_batch = FirstBatch()
        self._read = 0
        """Batches of the one-process order that were read in this epoch."""
        self._finished = False
        """Whether this epoch was read to its end."""
        self._restored: dict[str, Any] | None = None
        """The state of a checkpoint, which the next ``start`` begins from."""

    @property
    def micro_batch_size(self) -> int | None:
        size = getattr(self._given, "batch_size", None)
        return size if isinstance(size, int) else None

    def len_batches(self, position: Position | None = None) -> int | None:
        total = length_of(self._loader)
        if total is None:
            return None
        items = self.items_before(position)
        left = max(total - items // self._readers_per_batch, 0)
        return ceil_div(items, self.span) + ceil_div(left, self._size)

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        pass_epoch_to(self._given, epoch)
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            self._loader.generator.manual_seed(mix_seed(self._seed, epoch))
        first = self.items_before(position) // self._readers_per_batch
        batches = self._begin(first, position is None)
        if self._stateful is not None:
            batches = self._counted(batches)
        skip(batches, first - self._read, self.name, self.announce)
        if self._size == 1:
            return batches
        return _round_robin(self._first_batch.noted(batches), self._rank, self._size)

    def first_batches(self) -> list[str | None]:
        return [] if self._size == 1 else [self._first_batch.fingerprint]

    def _begin(self, first: int, new_epoch: bool) -> Iterator[Any]:
        """Return an iterator from the restored state if that is at or before batch ``first``, else from the start.

        Sets ``_read`` to the iterator's position.
        """
        restored, self._restored = self._restored, None
        self._read, self._finished = 0, False
        if restored is None or self._stateful is None or (restored["read"] > first and not new_epoch):
            return self._passes.begin()
        self._stateful.load_state_dict(restored["state"])
        if not new_epoch:
            self._read, self._finished = restored["read"], restored["finished"]
            if self._finished:
                # The loader would start again.
                return iter(())
        elif self._stateful is self._loader and not restored["finished"]:
            # Begin and drop the interrupted pass, which the loader would otherwise continue.
            self._passes.begin()
        return self._passes.begin()

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._read += 1
            yield batch
        self._finished = True

    def state_after(self, batches: int | None) -> Any:
        if self._stateful is None or not self.keeps_state or not self.started or self._restored is not None:
            return self._restored
        if batches is not None and self._read > int(self.position_after(batches)["batches"]) // self._readers_per_batch:
            return None
        return {"read": self._read, "finished": self._finished, "state": self._stateful.state_dict()}

    def restore(self, states: Sequence[Any], own: bool) -> None:
        if own or self._readers_per_batch == 1:
            # The former ranks read the same stream, each up to its own part; the state furthest ahead avoids most
            # reading.
            known = [state for state in states if state is not None]
            self._restored = max(known, key=lambda state: int(state["read"]), default=None)


def _stateful_part(loader: Any) -> Any:
    """Return the stateful object of a loader: itself, or its dataset if that is read in this process; else None."""
    if _is_stateful(loader):
        return loader
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and _is_stateful(loader.dataset):
        return loader.dataset
    return None


def _is_stateful(thing: Any) -> bool:
    """Whether ``thing`` has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


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
