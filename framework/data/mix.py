"""``Mix``: samples of several datasets, in given proportions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, closest_or_known, unknown
from ..core.position_rng import mix_seed
from .item_reader import ItemReader, check_dataset, has_indices
from .mix_schedule import MixSchedule
from .orders import permutation

Weights = Mapping[str, float] | Sequence[float]
ENDS = ("first", "all")


class Mix(Dataset[Any]):
    """Samples of several datasets in exact proportions: any first n samples hold ``w n`` of a source of share ``w``,
    to within one.

    If all sources are map-style, so is the mix: sample i is a function of the seed, the epoch and i alone, whatever the
    numbers of ranks and workers. Otherwise the mix is an ``IterableDataset`` with ``state_dict`` and
    ``load_state_dict``.

    A source that is used up starts again, in another order. Read a mix without shuffling its indices: it shuffles its
    map-style sources itself. ``phalanx`` calls ``set_epoch``.

    Args:
        sources: datasets by name, or a list of them, whose names are ``"0"``, ``"1"``, ....
        weights: a number for each source, 0 or more, of which only the ratios count; or a function of the epoch that
            returns them, which needs a number for ``stop``.
        seed: the seed of the order within each source.
        stop: the end of an epoch. ``"first"``: after the last sample of the source that is used up first; ``"all"``:
            after each source was used up once; a number: after as many samples. An iterable source is known to be used
            up when it is asked for another sample. With an iterable source, each worker of a ``DataLoader`` mixes its
            own parts of the sources: it yields its share of a number of samples, and ``"first"`` and ``"all"`` apply to
            its parts.
        shuffle: read map-style sources in an order that differs in each pass; else in their own.

    Raises:
        ConfigurationError: a source is empty or not a dataset, or the weights or ``stop`` do not fit.
        UnknownNameError: a weight is for a source that does not exist.
    """

    def __new__(cls, sources: Any = (), *args: Any, **options: Any) -> Mix:
        are_indexed = all(has_indices(each) for each in _by_name(sources).values())
        return super().__new__(cls if are_indexed else MixedStream)

    @names_arguments
    def __init__(
        self,
        sources: Mapping[str, Any] | Sequence[Any],
        weights: Weights | Callable[[int], Weights],
        *,
        seed: int = 0,
        stop: str | int = "first",
        shuffle: bool = True,
    ) -> None:
        named = _by_name(sources)
        if not named:
            raise ConfigurationError("Mix got no sources: give at least one dataset.")
        for name, data in named.items():
            check_dataset(data, f"source {name!r} of Mix")
        _check_stop(stop, callable(weights))
        self.names = tuple(named)
        self.stop = stop
        self._sources = list(named.values())
        self._weights = weights
        self._seed = seed
        self._shuffle = shuffle
        # Shared with workers that persist from epoch to epoch, and hold a copy of this object.
        self._shared_epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._planned: tuple[int, MixSchedule] | None = None
        self._length: int | None = None
        self._orders: dict[int, tuple[tuple[int, int], Sequence[int]]] = {}
        self._plan()

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch, and its weights."""
        self._shared_epoch.fill_(epoch)
        self._plan()
        for data in self._sources:
            if callable(inform := getattr(data, "set_epoch", None)):
                inform(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of ``set_epoch``, 0 at first."""
        return int(self._shared_epoch)

    def _plan(self) -> tuple[int, MixSchedule]:
        """Return the epoch and its schedule."""
        epoch = self.epoch
        if self._planned is None or (self._planned[0] != epoch and callable(self._weights)):
            given = self._weights(epoch) if callable(self._weights) else self._weights
            schedule = MixSchedule(_by_source(given, self.names))
            self._length = self._count(schedule)
        else:
            schedule = self._planned[1]
        self._planned = epoch, schedule
        return self._planned

    def _count(self, schedule: MixSchedule) -> int | None:
        """Return the number of samples in an epoch, or None if it is known only at its end."""
        if isinstance(self.stop, int):
            return self.stop
        used = [source for source, count in enumerate(schedule.counts) if count]
        if not all(has_indices(self._sources[source]) for source in used):
            return None
        ends = [schedule.position(source, len(self._sources[source]) - 1) + 1 for source in used]
        return min(ends) if self.stop == "first" else max(ends)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"a Mix of iterable sources with stop={self.stop!r} has no length")
        return self._length

    def locate(self, index: int) -> tuple[str, int]:
        """Return the name of the source of sample ``index`` of this epoch, and the sample's index in the source.

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
        """
        source, place = self._locate(index)
        return self.names[source], place

    def __getitem__(self, index: int) -> Any:
        source, place = self._locate(index)
        return self._sources[source][place]

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is not in a mix of {len(self)} samples")
        epoch, schedule = self._plan()
        source, count = schedule.locate(index)
        total = len(self._sources[source])
        passes, place = divmod(count, total)
        if not self._shuffle:
            return source, place
        if self._orders.get(source, ((-1, -1), ()))[0] != (epoch, passes):
            order = permutation(total, mix_seed(self._seed, source, passes), epoch)
            self._orders[source] = (epoch, passes), order
        return source, self._orders[source][1][place]


class MixedStream(Mix, IterableDataset[Any]):
    """A ``Mix`` with an iterable source: an ``IterableDataset`` whose ``state_dict`` resumes it at the same sample."""

    _readers: Sequence[ItemReader] = ()
    _restored: dict[str, Any] | None = None
    _drawn = 0
    _used_up: frozenset[int] = frozenset()

    def __getitem__(self, index: int) -> Any:
        raise TypeError("a Mix of iterable sources is iterable itself and has no indices")

    def __iter__(self) -> Iterator[Any]:
        state, self._restored = self._restored, None
        epoch, schedule = self._plan()
        if state is not None and state["epoch"] != epoch:
            state = None
        self._readers = [
            ItemReader(data, f"source {name!r} of Mix", mix_seed(self._seed, number), self._shuffle)
            for number, (name, data) in enumerate(zip(self.names, self._sources, strict=True))
        ]
        self._drawn = 0 if state is None else int(state["drawn"])
        self._used_up = frozenset(() if state is None else state["used_up"])
        for name, reader in zip(self.names, self._readers, strict=True):
            reader.start(epoch, None if state is None else state["sources"].get(name))
        return self._samples(schedule)

    def _samples(self, schedule: MixSchedule) -> Iterator[Any]:
        needed = {source for source, count in enumerate(schedule.counts) if count}
        most = _worker_share(self.stop) if isinstance(self.stop, int) else None
        while most is None or self._drawn < most:
            source = schedule.locate(self._drawn)[0]
            try:
                sample = next(self._readers[source])
            except StopIteration:
                self._used_up |= {source}
                if self.stop == "first" or (self.stop == "all" and self._used_up >= needed):
                    return
                self._readers[source].restart()
                sample = next(self._readers[source])
            # Counted before it is passed on, so that the state is that after the sample.
            self._drawn += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample, and the states of the sources that have one."""
        sources = {name: reader.state_dict() for name, reader in zip(self.names, self._readers, strict=False)}
        return {"epoch": self.epoch, "drawn": self._drawn, "used_up": sorted(self._used_up), "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state, if it is of the same epoch.

        Raises:
            UnknownNameError: the state is of a mix of other sources.
        """
        for name in state["sources"]:
            if name not in self.names:
                raise unknown("source of Mix", name, self.names)
        self._restored = state


def _by_name(sources: Any) -> dict[str, Any]:
    """Return the sources by name.

    Raises:
        ConfigurationError: they are not a dict or a list.
    """
    if isinstance(sources, Mapping):
        return dict(sources)
    if not isinstance(sources, Sequence) or isinstance(sources, str | bytes):
        raise ConfigurationError(
            f"Mix got a {type(sources).__name__} for its sources: give a dict or a list of datasets, even of one."
        )
    return {str(number): each for number, each in enumerate(sources)}


def _worker_share(count: int) -> int:
    """Return how many of ``count`` samples are drawn here: all, or in a worker of a ``DataLoader`` its share."""
    info = get_worker_info()
    return count if info is None else len(range(info.id, count, info.num_workers))


def _check_stop(stop: Any, weights_vary: bool) -> None:
    is_count = isinstance(stop, int) and not isinstance(stop, bool)
    if not is_count and stop not in ENDS:
        raise ConfigurationError(f"stop={stop!r} of Mix is not 'first', 'all' or a number of samples.")
    if is_count and stop < 1:
        raise ConfigurationError(f"stop={stop} of Mix must be at least 1 sample.")
    if weights_vary and not is_count:
        raise ConfigurationError(
            f"Mix got a function for weights and stop={stop!r}, with which the length would differ from epoch to "
            "epoch: give stop a number of samples."
        )


def _by_source(weights: Any, names: Sequence[str]) -> list[float]:
    """Return the weights in the order of the sources.

    Raises:
        ConfigurationError: they do not fit the sources.
    """
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in names:
                raise unknown("weight of Mix", name, names)
        for name in names:
            if name not in weights:
                raise ConfigurationError(
                    f"weights of Mix has none for source {name!r}.{closest_or_known(name, list(weights))}"
                )
        given = [weights[name] for name in names]
    else:
        given = _listed(weights, len(names))
    if len(given) != len(names):
        raise ConfigurationError(f"Mix got {len(given)} weights for {len(names)} sources: give one for each.")
    for name, weight in zip(names, given, strict=True):
        is_number = isinstance(weight, Real | Decimal) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ConfigurationError(f"the weight {weight!r} of source {name!r} of Mix must be a number of 0 or more.")
    if not any(given):
        raise ConfigurationError("all weights of Mix are 0: give at least one source a weight above 0.")
    return given


def _listed(weights: Any, count: int) -> list[Any]:
    # Numbers of a tensor of float32 have other ratios than those that were written.
    if not isinstance(weights, str | Tensor):
        try:
            return list(weights)
        except TypeError:
            pass
    raise ConfigurationError(
        f"Mix got {weights!r} for the weights of {count} sources: give a number for each, as a list or a dict."
    )
