"""``CombinedLoader``: several loaders read in parallel or in sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, DataError, unknown
from ..core.torch_internals import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten
from .dataloader import check_loader

MODES = ("min_size", "max_size", "max_size_cycle", "sequential")

Rows = Iterator[tuple[Any, ...]]


class CombinedLoader:
    """Combines several loaders into one.

    Modes, with ``n`` loaders:

    - ``min_size``: a batch consists of one batch from each loader, in the structure of ``iterables``, until the
      shortest ends.
    - ``max_size``: until the longest ends; the batch of a loader that has ended is ``None``.
    - ``max_size_cycle``: until the longest ends; loaders that end earlier start again. Each loader needs at least one
      batch for each rank.
    - ``sequential``: the batches of the first loader, then those of the second; for evaluation only.

    Iterating yields ``(batch, batch_idx, dataloader_idx)``; the last is 0 except in ``sequential`` mode.
    """

    @names_arguments
    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        """``iterables``: a dict, list or tuple of loaders, nested or not.

        Raises:
            ConfigurationError: the mode is not known, or a part is not a loader.
        """
        if mode not in MODES:
            raise unknown("mode", mode, MODES)
        self.iterables = iterables
        self.mode = mode
        self._unfolded = side_by_side(iterables, "iterables")

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in the order of the structure."""
        return list(self._unfolded.leaves)

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.flattened]
        return sum(lengths) if self.mode == "sequential" else (min if self.mode == "min_size" else max)(lengths)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        loaders, spec = self.flattened, self._unfolded.spec
        if self.mode == "sequential":
            for number, loader in enumerate(loaders):
                for index, batch in enumerate(loader):
                    yield batch, index, number
            return
        rows = merge(self.mode, [iter(each) for each in loaders], lambda part, cycle: iter(loaders[part]))
        for index, row in enumerate(rows):
            yield tree_unflatten(row, spec), index, 0


class Unfolded(NamedTuple):
    """The loaders of a structure, their paths in it, and the structure."""

    name: str
    paths: list[str]
    leaves: list[Any]
    spec: TreeSpec

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield each loader with its name in messages, such as ``train_dataloaders['a']``."""
        return zip([f"{self.name}{path}" for path in self.paths], self.leaves, strict=True)


def unfold(loaders: Any, name: str) -> Unfolded:
    """Flatten a structure of loaders. A nested list that contains no loader counts as a loader: a list of batches.

    Raises:
        ConfigurationError: the structure contains no loader.
    """
    found, spec = tree_flatten_with_path(loaders, is_leaf=lambda each: each is not loaders and not is_collection(each))
    if not found:
        raise ConfigurationError(f"{name} is an empty {type(loaders).__name__}; give at least one loader.")
    return Unfolded(name, [keystr(path) for path, _ in found], [leaf for _, leaf in found], spec)


def side_by_side(loaders: Any, name: str) -> Unfolded:
    """Flatten a structure of loaders that are read in parallel.

    Raises:
        ConfigurationError: a part is not a loader, or is itself a ``CombinedLoader``.
    """
    unfolded = unfold(loaders, name)
    for path, loader in unfolded.named():
        if isinstance(loader, CombinedLoader):
            raise ConfigurationError(
                f"{path} is a CombinedLoader, which cannot be nested; put its loaders beside the others, "
                "for example as a dict within a dict."
            )
        check_loader(loader, path)
    return unfolded


def is_collection(loaders: Any) -> bool:
    """Whether ``loaders`` is a structure of loaders: a dict, or a list or tuple that begins with a loader.

    A list that begins with anything else is a list of batches.
    """
    return isinstance(loaders, dict) or (isinstance(loaders, list | tuple) and _begins_with_loader(loaders))


def _begins_with_loader(given: Any) -> bool:
    while isinstance(given, list | tuple | dict) and given:
        given = next(iter(given.values())) if isinstance(given, dict) else given[0]
    if isinstance(given, DataLoader | CombinedLoader):
        return True
    # Batches may be iterable too, so a loader other than a DataLoader is recognized by its dataset or by being an
    # iterator.
    return hasattr(type(given), "__iter__") and (hasattr(given, "dataset") or hasattr(type(given), "__next__"))


def merge(mode: str, parts: list[Iterator[Any]], reopen: Callable[[int, int], Iterator[Any]]) -> Rows:
    """Yield rows with one item from each part. ``reopen(part, cycle)`` restarts a part for the ``cycle``-th time."""
    if mode == "min_size":
        return zip(*parts, strict=False)
    if mode == "max_size":
        return itertools.zip_longest(*parts)
    return cycle_parts(parts, reopen, [0] * len(parts))


def cycle_parts(parts: list[Iterator[Any]], reopen: Callable[[int, int], Iterator[Any]], cycles: list[int]) -> Rows:
    """Yield one item of each part until each has ended once; ``cycles`` counts the restarts of each.

    Raises:
        DataError: a part yields nothing after a restart.
    """
    ended = [cycle > 0 for cycle in cycles]
    end = object()
    while True:
        # The parts that decide whether there is another row are read first: the others then yield exactly one item per
        # row.
        row = [end if ended[part] else next(iterator, end) for part, iterator in enumerate(parts)]
        restarted = [part for part, done in enumerate(ended) if done]
        ended = [item is end for item in row]
        if all(ended):
            return
        for part in restarted:
            row[part] = next(parts[part], end)
        for part in [part for part, item in enumerate(row) if item is end]:
            cycles[part] += 1
            parts[part] = reopen(part, cycles[part])
            row[part] = next(parts[part], end)
            if row[part] is end:
                raise DataError(
                    f"loader {part} of a combination yields nothing when it is restarted; mode='max_size_cycle' "
                    "needs loaders that can be read more than once: give such a loader, or use mode='min_size'."
                )
        yield tuple(row)


def combined_length(mode: str, lengths: list[int | None]) -> int | None:
    """Return the length of a combination, or None if the length of a part is unknown."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return min(known) if mode == "min_size" else max(known)


def separate(loaders: Any, name: str) -> list[tuple[str, Any]]:
    """Return the loaders that an evaluation reads one after the other, each with its name in messages."""
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader):
        return list(unfold(loaders.iterables, name).named()) if loaders.mode == "sequential" else [(name, loaders)]
    if is_collection(loaders) and loaders:
        return list(unfold(loaders, name).named())
    return [(name, loaders)]
