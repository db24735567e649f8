"""Training data from any iterable of batches, stateful loaders and datasets included.

The user's loader is not modified: a ``DataLoader`` is copied (shallowly) with another generator, any other iterable is
iterated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..core.position_rng import mix_seed
from ..distributed.data_parallel import ceil_div
from .dataloader import Passes, pass_epoch_to, private_copy, seed_of, skip
from .orders import length_of
from .training_source import NO_BATCH, CountedSource, Position


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
        self._stateful = _stateful_part(self._loader)
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
        pass_epoch_to(self._given, epoch)
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            self._loader.generator.manual_seed(mix_seed(self._seed, epoch))
        first = self.items_before(position) // self._shares
        batches = self._begin(first, position is None)
        if self._stateful is not None:
            batches = self._counted(batches)
        skip(batches, first - self._read, self.name, self.announce)
        return batches if self._size == 1 else _every(batches, self._rank, self._size)

    def _begin(self, first: int, new_epoch: bool) -> Iterator[Any]:
        """Return the batches from the loader's present position: its start, or a position up to batch ``first``."""
        kept, self._kept = self._kept, None
        self._read, self._finished = 0, False
        if kept is None or self._stateful is None or (kept["read"] > first and not new_epoch):
            return self._passes.begin()
        self._stateful.load_state_dict(kept["state"])
        if not new_epoch:
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
            known = [state for state in states if state is not None]
            self._kept = max(known, key=lambda state: int(state["read"]), default=None)


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


def _every(batches: Iterator[Any], rank: int, size: int) -> Iterator[Any]:
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
