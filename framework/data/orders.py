"""Orders: the sequence of items of an epoch, as the user's sampler yields them in one process."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..core.position_rng import RandomStream, mix_seed

_MOST_KEPT = 1 << 26


def length_of(thing: Any) -> int | None:
    """Return ``len(thing)``, or None if it has no length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, OverflowError):
        return None


def permutation(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Return a permutation of ``range(count)`` that is a function of the seed and the epoch."""
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    # An array takes 8 bytes per index; a list of ints would take 36, for the whole epoch.
    return array("q", torch.randperm(count, generator=generator).tolist())


class Order(Protocol):
    """The items of an epoch, in the order of one process."""

    def length(self) -> int | None:
        """Return the number of items, or None if unknown."""

    def items(self, epoch: int) -> Sequence[Any] | LazyItems:
        """Return the items of an epoch."""

    def described(self) -> str:
        """Return a human-readable description of the order."""

    def layout(self) -> dict[str, Any]:
        """Return how the order is made, in JSON values: ``kind``, and what it takes to make it again if that is known.

        A kind is ``"shuffled"``, ``"in order"``, or the name of the sampler's class.
        """


class NaturalOrder:
    """All samples of a dataset, once each: shuffled, or in the dataset's order."""

    def __init__(self, data: Any, seed: int, shuffle: bool) -> None:
        self._data = data
        self._seed = seed
        self._shuffle = shuffle

    def length(self) -> int | None:
        return len(self._data)

    def items(self, epoch: int) -> Sequence[Any]:
        count = len(self._data)
        return permutation(count, self._seed, epoch) if self._shuffle else range(count)

    def described(self) -> str:
        return "shuffled" if self._shuffle else "unshuffled"

    def layout(self) -> dict[str, Any]:
        kind = "shuffled" if self._shuffle else "in order"
        return {"kind": kind, "count": len(self._data), "seed": self._seed}


class SamplerOrder:
    """The items of a user's sampler or batch sampler, made reproducible by running it on a separate random stream."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def length(self) -> int | None:
        return length_of(self._sampler)

    def items(self, epoch: int) -> Sequence[Any] | LazyItems:
        stream = RandomStream(mix_seed(self._seed, epoch), own_generators(self._sampler))
        lazy = LazyItems(self._sampler, stream, self.length())
        return lazy if lazy.length is None or lazy.length > _MOST_KEPT else lazy.take(lazy.length)

    def described(self) -> str:
        return f"drawn by {type(self._sampler).__name__}"

    def layout(self) -> dict[str, Any]:
        return {"kind": type(self._sampler).__name__}


class LazyItems:
    """Items that are drawn from a sampler on demand, because they are too many or infinite."""

    def __init__(self, sampler: Iterable[Any], stream: RandomStream, length: int | None) -> None:
        self.length = length
        self._stream = stream
        self._items = itertools.islice(_iterate(sampler), length)

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` items; fewer at the end."""
        with self._stream.entered():
            return list(itertools.islice(self._items, count))


def _iterate(sampler: Iterable[Any]) -> Iterator[Any]:
    # A generator, so that ``iter`` is called with the first item too, on the sampler's own stream.
    yield from sampler


def samplers_of(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it wraps, outermost first."""
    chain: list[Any] = []
    while sampler is not None and not any(sampler is known for known in chain):
        chain.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return chain


def own_generators(sampler: Any) -> list[torch.Generator]:
    """Return the torch generators of a sampler and of the samplers that it wraps, each once."""
    found = [getattr(each, "generator", None) for each in samplers_of(sampler)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def chunks(items: Sequence[Any] | LazyItems, start: int, width: int) -> Iterator[Sequence[Any]]:
    """Yield chunks of ``width`` consecutive items, beginning at ``start``; the last chunk may be shorter."""
    if isinstance(items, LazyItems):
        while start > 0:
            start -= len(items.take(min(start, 65536))) or start
        yield from iter(lambda: items.take(width), [])
    else:
        for begin in range(start, len(items), width):
            yield items[begin : begin + width]
