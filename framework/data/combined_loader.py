"""``CombinedLoader``: several loaders read side by side, or one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten
from torch.utils.data import DataLoader

from ..core.errors import ConfigurationError, DataError, unknown
from .dataloader import check_loader

MODES = ("min_size", "max_size", "max_size_cycle", "sequential")

Rows = Iterator[tuple[Any, ...]]


class CombinedLoader:
    """Several loaders as one.

    Modes, with ``n`` loaders:

    - ``min_size``: a batch is one of each, in the structure of ``iterables``, until the shortest ends.
    - ``max_size``: until the longest ends; None stands for the batch of a loader that has ended.
    - ``max_size_cycle``: until the longest ends; those that end before are started anew.
    - ``sequential``: the batches of the first loader, then those of the second; for evaluation only.

    Iterating yields ``(batch, batch_idx, dataloader_idx)``; the last is 0 but in ``sequential``.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        """``iterables``: a dict, list or tuple of loaders, nested or not.

        Raises:
            ConfigurationError: the mode is not known, or a part is no loader.
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
    """The loaders of a structure, where they stand in it, and the structure."""

    name: str
    paths: list[str]
    leaves: list[Any]
    spec: TreeSpec

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield each loader with what a message calls it, such as ``train_dataloaders['a']``."""
        return zip([f"{self.name}{path}" for path in self.paths], self.leaves, strict=True)


def unfold(loaders: Any, name: str) -> Unfolded:
    """Take a structure of loaders apart. A list within it that holds no loader is a loader itself: a list of batches.

    Raises:
        ConfigurationError: there is no loader in it.
    """
    found, spec = tree_flatten_with_path(loaders, is_leaf=lambda each: each is not loaders and not is_collection(each))
    if not found:
        raise ConfigurationError(f"{name} is an empty {type(loaders).__name__}; give at least one loader.")
    return Unfolded(name, [keystr(path) for path, _ in found], [leaf for _, leaf in found], spec)


def side_by_side(loaders: Any, name: str) -> Unfolded:
    """Take apart a structure of loaders that are read together.

    Raises:
        ConfigurationError: a part is no loader, or a combination itself.
    """
    unfolded = unfold(loaders, name)
    for path, loader in unfolded.named():
        if isinstance(loader, CombinedLoader):
            raise ConfigurationError(
                f"{path} is a CombinedLoader, and combinations do not nest; put its loaders beside the others, "
                "a dict within a dict for instance."
            )
        check_loader(loader, path)
    return unfolded


def is_collection(loaders: Any) -> bool:
    """Whether this is a structure of loaders: a dict, or a list or tuple that begins with a loader.

    A list that begins with anything else is a list of batches.
    """
    return isinstance(loaders, dict) or (isinstance(loaders, list | tuple) and _begins_with_loader(loaders))


def _begins_with_loader(given: Any) -> bool:
    while isinstance(given, list | tuple | dict) and given:
        given = next(iter(given.values())) if isinstance(given, dict) else given[0]
    if isinstance(given, DataLoader | CombinedLoader):
        return True
    # Batches may be iterable objects too, so a loader that is no DataLoader is known by its dataset or by being read.
    return hasattr(type(given), "__iter__") and (hasattr(given, "dataset") or hasattr(type(given), "__next__"))


def merge(mode: str, parts: list[Iterator[Any]], reopen: Callable[[int, int], Iterator[Any]]) -> Rows:
    """Yield one item of each part at a time. ``reopen(part, cycle)`` starts a part anew, for the ``cycle``-th time."""
    if mode == "min_size":
        return zip(*parts, strict=False)
    if mode == "max_size":
        return itertools.zip_longest(*parts)
    return cycle_parts(parts, reopen, [0] * len(parts))


def cycle_parts(parts: list[Iterator[Any]], reopen: Callable[[int, int], Iterator[Any]], cycles: list[int]) -> Rows:
    """Yield one item of each part until each has ended once; ``cycles`` counts how often each has been started anew.

    Raises:
        DataError: a part yields nothing when started anew.
    """
    ended = [cycle > 0 for cycle in cycles]
    end = object()
    while True:
        # Those that decide whether there is a row come first: no more is read of the others than rows are.
        row = [end if ended[part] else next(iterator, end) for part, iterator in enumerate(parts)]
        began_anew = [part for part, done in enumerate(ended) if done]
        ended = [item is end for item in row]
        if all(ended):
            return
        for part in began_anew:
            row[part] = next(parts[part], end)
        for part in [part for part, item in enumerate(row) if item is end]:
            cycles[part] += 1
            parts[part] = reopen(part, cycles[part])
            row[part] = next(parts[part], end)
            if row[part] is end:
                raise DataError(
                    f"loader {part} of a combination yields nothing when it is started anew; mode='max_size_cycle' "
                    "needs loaders that can be read more than once: give such a loader, or use mode='min_size'."
                )
        yield tuple(row)


def combined_length(mode: str, lengths: list[int | None]) -> int | None:
    """Return the length of a combination, or None where that of a part is unknown."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return min(known) if mode == "min_size" else max(known)


def separate(loaders: Any, name: str) -> list[tuple[str, Any]]:
    """Return the loaders that an evaluation reads one after the other, each with what a message calls it."""
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader):
        return list(unfold(loaders.iterables, name).named()) if loaders.mode == "sequential" else [(name, loaders)]
    if is_collection(loaders) and loaders:
        return list(unfold(loaders, name).named())
    return [(name, loaders)]
