"""Random numbers that depend only on a position in the data.

A sampler written by the user runs on a separate stream, so running it leaves the global generators unchanged and gives
the same order on every rank. In DataLoader workers the generators are seeded for each sample from (seed, epoch,
position), so that augmentation depends neither on the number of workers nor on where a run was resumed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Subset

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Return a seed below 2**63 in which every bit of every part counts (the finaliser of splitmix64, chained)."""
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int) -> None:
    """Seed the global CPU generators of Python, torch and, where it is loaded, numpy."""
    random.seed(seed)
    # Not ``torch.manual_seed``: it also queues work for devices that a worker never opens.
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


class RandomStream:
    """Runs code on a separate random stream: inside ``entered()``, the global and the given generators use it.

    The stream continues where the last ``entered()`` ended, so a sampler can be advanced in portions.
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._seed = seed
        self._generators = generators
        self._kept: tuple[Any, ...] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Switch to the stream; on exit, also after an exception, restore the previous state."""
        outside = self._read()
        if self._kept is None:
            seed_generators(self._seed)
            for generator in self._generators:
                generator.manual_seed(mix_seed(generator.initial_seed(), self._seed))
        else:
            self._write(self._kept)
        try:
            yield
        finally:
            self._kept = self._read()
            self._write(outside)

    def _read(self) -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        own = [generator.get_state() for generator in self._generators]
        legacy = None if numpy is None else numpy.random.get_state()
        return random.getstate(), torch.get_rng_state(), legacy, own

    def _write(self, state: tuple[Any, ...]) -> None:
        python, cpu, legacy, own = state
        random.setstate(python)
        torch.set_rng_state(cpu)
        if legacy is not None:
            sys.modules["numpy"].random.set_state(legacy)
        for generator, kept in zip(self._generators, own, strict=True):
            generator.set_state(kept)


class SeededBatch(list[Any]):
    """The indices of a batch, with the epoch's seed and the position of the first index in the epoch's order."""

    def __init__(self, indices: Iterable[Any], seed: int, first: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.first = first

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, (list(self), self.seed, self.first)


class SeededIndex:
    """An index of any type that a sampler yielded, with the seed of its position in the order."""

    def __init__(self, index: Any, seed: int) -> None:
        self.index = index
        self.seed = seed


class SeededDataset:
    """Wraps a map-style dataset: seeds the generators before each fetch, and forwards all other attributes.

    It replaces the dataset in workers only, where no other random numbers are drawn.
    """

    _dataset: Any
    _in_batches: bool

    def __init__(self, dataset: Any) -> None:
        # Attributes set from outside, in a worker_init_fn for instance, belong to the dataset.
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_in_batches", _fetches_batches(dataset))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, SeededIndex):
            seed_generators(index.seed)
            index = index.index
        return self._dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        """Fetch a batch. Seeds each sample, or the batch once if the dataset fetches whole batches."""
        seed, first = getattr(indices, "seed", None), getattr(indices, "first", 0)
        indices = indices.index if isinstance(indices, SeededIndex) else indices
        if self._in_batches:
            if seed is not None:
                seed_generators(mix_seed(seed, first))
            return self._dataset.__getitems__(indices)
        if seed is None:
            return [self._dataset[index] for index in indices]
        return [self._seeded(index, mix_seed(seed, first + place)) for place, index in enumerate(indices)]

    def _seeded(self, index: Any, seed: int) -> Any:
        seed_generators(seed)
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset,)


def _fetches_batches(dataset: Any) -> bool:
    # ``Subset`` always has ``__getitems__``; it fetches whole batches only if the dataset that it wraps does.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
