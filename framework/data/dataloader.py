"""Inspection of a user's loader, the private copy of a ``DataLoader``, and the checks that refuse invalid loaders."""

from __future__ import annotations

import copy
import itertools
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..core.errors import ConfigurationError, DataError
from ..core.position_rng import SeededDataset
from ..core.wording import a_type
from ..system.environment import pins_batches
from .orders import NaturalOrder, Order, SamplerOrder, samplers_of
from .samplers import IndexSampler
from .worker_process import start_worker

# Seconds until the first message about a long skip, and between further messages.
_PATIENCE_SECONDS = 3.0
_REPEAT_SECONDS = 30.0


def skip(batches: Iterator[Any], count: int, name: str, announce: Callable[[str], None]) -> None:
    """Read and drop ``count`` batches; report progress if it takes long."""
    due = time.monotonic() + _PATIENCE_SECONDS
    for number, _ in enumerate(itertools.islice(batches, count), 1):
        if time.monotonic() >= due:
            due = time.monotonic() + _REPEAT_SECONDS
            announce(
                f"Skipping batches of {name} to the position of the run: {number:,} of {count:,} read so far. A loader "
                "or dataset with state_dict and load_state_dict would resume at once."
            )


class Passes:
    """Repeated passes over an iterable; detects an iterator, which can be read only once."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name
        self._begun = False

    def begin(self) -> Iterator[Any]:
        """Return an iterator for another pass.

        Raises:
            DataError: the iterable was read before and cannot be read again.
        """
        batches: Any = iter(self._loader)
        again, self._begun = self._begun, True
        if batches is not self._loader:
            return cast(Iterator[Any], batches)
        # A class whose ``__iter__`` returns itself may restart there; a generator cannot.
        if isinstance(type(batches).__iter__, types.FunctionType):
            if not again:
                return drain(batches)
            for first in drain(batches):
                return itertools.chain([first], drain(batches))
        elif not again:
            return cast(Iterator[Any], batches)
        raise DataError(
            f"{self._name} is an iterator ({type(self._loader).__name__}), which can be read only once, and a second "
            "pass is needed: give an object whose __iter__ starts again, such as a DataLoader or a list."
        )


def drain(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the remaining items of an iterator, without calling its ``__iter__``, which may restart it."""
    end = object()
    while (batch := next(batches, end)) is not end:
        yield batch


def copy_with(loader: DataLoader[Any], attributes: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a shallow copy of a loader with other attributes."""
    twin = copy.copy(loader)
    # No ordinary way: a ``DataLoader`` refuses to be assigned a sampler or a batch size after its construction, and a
    # subclass may have properties of these names, which must not be called, and a constructor of its own.
    vars(twin).update(attributes)
    return twin


def private_copy(loader: DataLoader[Any], sampler: IndexSampler | None, name: str) -> DataLoader[Any]:
    """Return a shallow copy of a loader with a separate generator and, if given, another sampler.

    Where the rank uses CUDA, the copy yields batches in pinned memory.

    Raises:
        ConfigurationError: the class does not let its sampler be replaced.
    """
    # A separate generator: creating an iterator draws a seed, by default from the global state.
    attributes: dict[str, Any] = {"generator": torch.Generator(), "_iterator": None}
    if loader.num_workers > 0:
        attributes["worker_init_fn"] = partial(start_worker, loader.worker_init_fn)
    if torch.cuda.is_initialized() and pins_batches():
        # From other memory, each copy to the device keeps the host waiting.
        attributes["pin_memory"] = True
    if sampler is None:
        return copy_with(loader, attributes)
    slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
    attributes[slot] = sampler
    if loader.num_workers > 0:
        attributes["dataset"] = SeededDataset(loader.dataset)
    twin = copy_with(loader, attributes)
    if getattr(twin, slot) is not sampler:
        raise ConfigurationError(
            f"{name} is {a_type(loader)} that computes its own {slot}, which phalanx must replace to shard "
            f"the data and to resume: make {slot} a plain attribute of the loader."
        )
    return twin


def iterate_copy(twin: DataLoader[Any], sampler: IndexSampler, seed: int, name: str) -> Iterator[Any]:
    """Return an iterator over a private copy; raise if the copy does not read its sampler."""
    if twin.generator is not None:
        twin.generator.manual_seed(seed)
    sampler.begun = False
    begun: Any = iter(twin)
    batches: Iterator[Any] = drain(begun) if begun is cast(Any, twin) else begun
    return batches if sampler.begun else _checked(batches, sampler, type(twin).__name__, name)


def _checked(batches: Iterator[Any], sampler: IndexSampler, kind: str, name: str) -> Iterator[Any]:
    # A subclass whose ``__iter__`` is a generator reads its sampler at the first batch only.
    for batch in batches:
        if not sampler.begun:
            raise DataError(
                f"{name} is a {kind} whose __iter__ does not read its sampler, so it can be neither sharded nor "
                "resumed as a DataLoader: do not derive it from DataLoader; its batches are then distributed in order."
            )
        yield batch


def seed_of(loader: Any, seed: int) -> int:
    """Return the seed of a loader's own generator if it has one, else ``seed``."""
    own = getattr(loader, "generator", None)
    return own.initial_seed() if isinstance(own, torch.Generator) else seed


def distributed_samplers(loader: Any) -> list[DistributedSampler[Any]]:
    """Return the ``DistributedSampler`` objects among a loader's samplers."""
    chain = [*samplers_of(loader.batch_sampler), *samplers_of(loader.sampler)]
    return [each for each in chain if isinstance(each, DistributedSampler)]


def order_of(loader: DataLoader[Any], seed: int, sequential: bool = False) -> tuple[Order, int, bool, bool]:
    """Return a map-style loader's order, the items per batch, whether an item is an entire batch, and ``drop_last``."""
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:
        return _order_of_samples(batches.sampler, seed, sequential), batches.batch_size, False, batches.drop_last
    if batches is not None:
        return SamplerOrder(batches, seed), 1, True, False
    return _order_of_samples(loader.sampler, seed, sequential), 1, True, False


def _order_of_samples(sampler: Any, seed: int, sequential: bool) -> Order:
    if type(sampler) is SequentialSampler:
        return NaturalOrder(sampler.data_source, seed, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        own = sampler.generator
        seed = seed if own is None else own.initial_seed()
        return NaturalOrder(sampler.data_source, seed, shuffle=not sequential)
    return SamplerOrder(sampler, seed)


def in_order(loader: Any) -> Any:
    """Return a loader that reads the samples of a shuffled ``DataLoader`` in order; any other loader as it is."""
    if not is_map_style(loader) or type(loader.batch_sampler) is not BatchSampler:
        return loader
    if type(loader.sampler) is not RandomSampler:
        return loader
    batches = BatchSampler(SequentialSampler(loader.dataset), loader.batch_size, loader.drop_last)
    return copy_with(loader, {"batch_sampler": batches, "batch_size": loader.batch_size})


def is_map_style(loader: Any) -> bool:
    """Whether ``loader`` is a ``DataLoader`` whose samples are fetched by index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def check_loader(loader: Any, name: str) -> None:
    """Refuse an object that is not a loader.

    Raises:
        ConfigurationError: ``loader`` is not a loader; the message gives the rule and the next step.
    """
    given = f"{name} is {a_type(loader)}"
    rule = "a loader is a DataLoader or any other iterable of batches"
    if isinstance(loader, DataLoader):
        return
    if isinstance(loader, Dataset):
        size = "batch_size=None or a number" if isinstance(loader, IterableDataset) else "batch_size=..."
        raise ConfigurationError(f"{given}, a dataset; {rule}: wrap it, DataLoader(dataset, {size}).")
    if isinstance(loader, str | bytes | torch.Tensor | Mapping):
        raise ConfigurationError(f"{given}; {rule}: wrap your data in a DataLoader.")
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        hint = "call it and give what it returns" if callable(loader) else "give it an __iter__ that yields batches"
        raise ConfigurationError(f"{given}, which cannot be iterated; {rule}: {hint}.")
