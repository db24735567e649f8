"""Reading the samples of a dataset one by one, in passes that resume at the same sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..core.errors import ConfigurationError, DataError
from .orders import permutation
from .stateful_loader import has_exact_state

# Between the numbers of the passes of one epoch, which a source takes for epochs.
_PASSES_APART = 1 << 20


def has_indices(data: Any) -> bool:
    """Whether ``data`` is a map-style dataset: it has a length, and its samples are fetched by index."""
    kind = type(data)
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not isinstance(data, IterableDataset)


def check_dataset(data: Any, name: str) -> None:
    """Refuse an object that is not a dataset, or that is an empty one.

    Raises:
        ConfigurationError: with the rule and the next step.
    """
    if not has_indices(data) and not hasattr(type(data), "__iter__"):
        raise ConfigurationError(
            f"{name} is a {type(data).__name__}, which is not a dataset: give an object with __getitem__ and __len__, "
            "or with __iter__."
        )
    if isinstance(data, Iterator):
        raise ConfigurationError(
            f"{name} is an iterator ({type(data).__name__}), which can be read only once: give an object whose "
            "__iter__ starts again."
        )
    if has_indices(data) and len(data) == 0:
        raise ConfigurationError(f"{name} is empty: give a dataset with at least one sample, or leave it out.")


class ItemReader:
    """Reads a dataset in passes. A map-style dataset is shuffled in each pass, by the seed, the epoch and the pass.

    In a worker of a ``DataLoader``, a map-style dataset is split over the workers. An iterable dataset must do that
    itself, as always in torch.
    """

    def __init__(self, data: Any, name: str, seed: int, shuffle: bool) -> None:
        self.name = name
        self.passes = 0
        """The number of passes of this epoch that have ended."""
        self._data = data
        self._seed = seed
        self._shuffle = shuffle
        self._stateful = has_exact_state(data)
        self._epoch = self._count = 0
        self._finished = False
        self._pending: Any = None
        """The dataset's own state, if it was restored and is not loaded yet."""
        self._items: Iterator[Any] = iter(())

    def start(self, epoch: int, state: dict[str, Any] | None = None) -> None:
        """Begin an epoch, or continue it from a state of ``state_dict``."""
        self._epoch, self.passes = epoch, 0 if state is None else int(state["passes"])
        self._begin(state)

    def restart(self) -> None:
        """Begin another pass of the epoch."""
        self.passes += 1
        self._begin(None)

    def __next__(self) -> Any:
        """Return the next sample of the pass.

        Raises:
            StopIteration: at the end of the pass.
            DataError: the pass yields no sample at all.
        """
        try:
            item = next(self._items)
        except StopIteration:
            self._finished = True
            # A worker may have no part of an iterable dataset.
            if self._count == 0 and (self.passes or get_worker_info() is None):
                raise DataError(
                    f"{self.name} yields no sample: give a dataset that has one in each pass, for each worker."
                ) from None
            raise
        self._count += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the position. It holds the dataset's own state, if it has one."""
        state = {"passes": self.passes, "count": self._count, "finished": self._finished}
        if not self._stateful or not self._count:
            return state
        return {**state, "data": self._data.state_dict() if self._pending is None else self._pending}

    def _begin(self, state: dict[str, Any] | None) -> None:
        number = self._epoch + self.passes * _PASSES_APART
        self._pending = None
        self._count, self._finished = (0, False) if state is None else (int(state["count"]), bool(state["finished"]))
        if callable(set_epoch := getattr(self._data, "set_epoch", None)):
            set_epoch(number)
        if self._finished:
            # A dataset that has ended may start again from its state.
            self._items = iter(())
        elif has_indices(self._data):
            self._items = self._indexed(number, self._count)
        elif state is not None and self._stateful and "data" in state:
            self._pending = state["data"]
            self._items = self._continued()
        else:
            self._items = itertools.islice(iter(self._data), self._count, None)

    def _continued(self) -> Iterator[Any]:
        # Not before the first sample is needed: a dataset that is not read would keep the position for its next pass.
        self._data.load_state_dict(self._pending)
        self._pending = None
        yield from self._data

    def _indexed(self, number: int, first: int) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        total = len(self._data)
        order = permutation(total, self._seed, number) if self._shuffle else range(total)
        for place in range(worker + first * workers, total, workers):
            yield self._data[order[place]]
