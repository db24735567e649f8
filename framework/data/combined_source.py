"""Data sources for the loops: one for a user's loader, or for several loaders read together."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..core.errors import CheckpointError, ConfigurationError, DataError
from ..core.global_batch import GlobalBatch
from ..core.torch_internals import TreeSpec, tree_map, tree_unflatten
from .combined_loader import (
    CombinedLoader,
    Rows,
    combined_length,
    cycle_parts,
    is_collection,
    merge,
    separate,
    side_by_side,
)
from .dataloader import check_loader, is_map_style
from .evaluation_source import EvaluationSource, NumberedBatches, evaluation_source
from .global_batches import global_batch_source
from .iterable_source import IterableSource
from .map_source import map_source
from .training_source import CONVERTED, NO_BATCH, Position, TrainingSource, require_batches

_EPOCHS_APART = 1 << 20


def prepare_training(
    loader: Any,
    *,
    rank: int,
    size: int,
    seed: int,
    shard: bool = True,
    sequential: bool = False,
    name: str = "train_dataloaders",
    global_batch: GlobalBatch | None = None,
) -> TrainingSource:
    """Return the source for a training loader, or for a collection of loaders, combined as ``max_size_cycle``.

    Args:
        loader: a ``DataLoader``, any other iterable of batches, a ``CombinedLoader``, or a dict, list or tuple of them.
        seed: the run's seed, the same on all ranks.
        shard: distribute the samples over the ranks; else each rank reads the full loader.
        sequential: read a shuffled ``DataLoader`` in the dataset's order, as ``overfit_batches`` does.
        name: the loader's name in messages.
        global_batch: read global batches, each of which counts as one batch; None: those of the loader.

    Raises:
        ConfigurationError: a loader cannot be used; the message gives the rule and the next step.
    """
    options: dict[str, Any] = {"rank": rank, "size": size, "seed": seed, "shard": shard, "sequential": sequential}
    if global_batch is not None:
        return require_batches(global_batch_source(loader, global_batch, name=name, **options), loader, size)
    if not isinstance(loader, CombinedLoader) and not is_collection(loader):
        return _training_source(loader, name, **options)
    mode, loader = (loader.mode, loader.iterables) if isinstance(loader, CombinedLoader) else ("max_size_cycle", loader)
    if mode == "sequential":
        raise ConfigurationError(
            f"{name} is a CombinedLoader(mode='sequential'), which is for evaluation; train with 'min_size', "
            "'max_size' or 'max_size_cycle', or put the datasets into one ConcatDataset."
        )
    unfolded = side_by_side(loader, name)
    parts = [_training_source(part, path, **options) for path, part in unfolded.named()]
    return CombinedTraining(parts, unfolded.spec, mode, name)


def _training_source(loader: Any, name: str, *, sequential: bool, **options: Any) -> TrainingSource:
    """Return the source for one training loader."""
    check_loader(loader, name)
    source: TrainingSource
    if is_map_style(loader):
        source = map_source(loader, sequential=sequential, name=name, **options)
    else:
        source = IterableSource(loader, name=name, **options)
    return require_batches(source, loader, options["size"])


def prepare_evaluation(
    loader: Any, *, rank: int, size: int, seed: int = 0, shard: bool = True, name: str = "val_dataloaders"
) -> EvaluationSource:
    """Return the source for an evaluation loader, or for a ``CombinedLoader`` that is not sequential.

    Raises:
        ConfigurationError: a loader cannot be used; the message gives the rule and the next step.
    """
    if not isinstance(loader, CombinedLoader):
        return evaluation_source(loader, rank=rank, size=size, seed=seed, shard=shard, name=name)
    if loader.mode == "sequential":
        raise ConfigurationError(
            f"{name} is a CombinedLoader(mode='sequential'), whose loaders are read one after the other: pass them "
            "separately."
        )
    unfolded = side_by_side(loader.iterables, name)
    options: dict[str, Any] = {"rank": rank, "size": size, "seed": seed, "shard": shard}
    parts = [evaluation_source(part, name=path, **options) for path, part in unfolded.named()]
    return CombinedEvaluation(parts, unfolded.spec, loader.mode, name, rank=rank, size=size)


def prepare_evaluations(
    loaders: Any, *, rank: int, size: int, seed: int = 0, shard: bool = True, name: str = "val_dataloaders"
) -> list[EvaluationSource]:
    """Return one source for each loader of a list, tuple or dict, in its order; an empty list for None."""
    return [
        prepare_evaluation(loader, rank=rank, size=size, seed=seed, shard=shard, name=path)
        for path, loader in separate(loaders, name)
    ]


class CombinedTraining(TrainingSource):
    """Several training sources read in parallel. Its position holds the cycle of each part and the position in it.

    In the last row of a part's cycle a rank may have no batch of it, but new batches of other parts. In mode
    ``max_size_cycle``, in which loaders start again, the rank takes its first batch of the cycle once more. In mode
    ``max_size`` the item is None, as that of a loader that has ended. A row without anything new is ``NO_BATCH``.
    """

    def __init__(self, parts: list[TrainingSource], spec: TreeSpec, mode: str, name: str) -> None:
        super().__init__()
        self.name = name
        self.keeps_state = any(part.keeps_state for part in parts)
        self._parts = parts
        self._spec = spec
        self._mode = mode
        # For each part, the rows at which its cycles of this epoch began; the first is the row at which the epoch was
        # resumed.
        self._begins: list[list[int]] = [[0] for _ in parts]
        self._first_cycles = [0] * len(parts)
        self._rows_read = 0
        # This rank's first batch in the present cycle of each part, where it was read.
        self._firsts: list[Any] = [NO_BATCH] * len(parts)
        self._epoch = 0

    def len_batches(self, position: Position | None = None) -> int | None:
        places = self._places(position)
        left: list[int | None] = []
        for part, (cycle, place) in zip(self._parts, places, strict=True):
            total = part.len_batches(place)
            left.append(None if total is None else 0 if cycle else total - part.batches_before(place))
        remaining = combined_length(self._mode, left)
        return None if remaining is None else self.batches_before(position) + remaining

    def first_batches(self) -> list[str | None]:
        return [mark for part in self._parts for mark in part.first_batches()]

    def batches_before(self, position: Position | None) -> int:
        if position is None:
            return 0
        if CONVERTED in position:
            return int(position[CONVERTED])
        rows = []
        for part, (cycle, place) in zip(self._parts, self._places(position), strict=True):
            length = part.len_batches() if cycle else 0
            if length is None:
                # The number of rows of an earlier cycle is known only for the layout with which it was read.
                return int(position["batches"])
            rows.append(cycle * length + part.batches_before(place))
        return max(rows)

    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        self._epoch, self._firsts = epoch, [NO_BATCH] * len(self._parts)
        self._rows_read = self.batches_before(position)
        self._begins = [[self._rows_read] for _ in self._parts]
        places = self._places(position)
        cycles = self._first_cycles = [cycle for cycle, _ in places]

        def reopen(part: int, cycle: int) -> Iterator[Any]:
            self._begins[part].append(self._rows_read)
            return self._parts[part].start(epoch + cycle * _EPOCHS_APART)

        opened = [
            part.start(epoch + cycle * _EPOCHS_APART, place)
            for part, (cycle, place) in zip(self._parts, places, strict=True)
        ]
        cycling = self._mode == "max_size_cycle"
        return self._fold(cycle_parts(opened, reopen, [*cycles]) if cycling else merge(self._mode, opened, reopen))

    def _fold(self, rows: Rows) -> Iterator[Any]:
        for row in rows:
            self._rows_read += 1
            own = self._filled(row) if any(item is NO_BATCH for item in row) else row
            self._hold_firsts(row)
            yield NO_BATCH if own is None else tree_unflatten(own, self._spec)

    def _filled(self, row: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return a row with an item of each part; None if this rank has nothing new in it."""
        if self._mode == "min_size":
            # The row after the last one in which every part has a batch for this rank.
            return None
        if self._mode == "max_size":
            own = tuple(None if item is NO_BATCH else item for item in row)
            return None if all(item is None for item in own) else own
        if all(item is NO_BATCH or self._cycle(number) > 0 for number, item in enumerate(row)):
            return None
        return tuple(self._first_of(number) if item is NO_BATCH else item for number, item in enumerate(row))

    def _cycle(self, number: int) -> int:
        """Return the number of a part's cycle, in the whole epoch, that the newest row belongs to."""
        return self._first_cycles[number] + len(self._begins[number]) - 1

    def _hold_firsts(self, row: tuple[Any, ...]) -> None:
        """Hold the item of each part whose cycle begins with this row."""
        for number, (begins, item) in enumerate(zip(self._begins, row, strict=True)):
            if begins[-1] == self._rows_read - 1 and (len(begins) > 1 or self._began_at is None):
                # Copied, since the step may modify the containers.
                self._firsts[number] = tree_map(lambda leaf: leaf, item)

    def _first_of(self, number: int) -> Any:
        """Return this rank's first batch of a part's present cycle.

        Raises:
            DataError: there is none.
        """
        item, part, cycle = self._firsts[number], self._parts[number], self._cycle(number)
        if item is NO_BATCH and cycle == self._first_cycles[number]:
            # The epoch was resumed within the cycle.
            item = next(part.start(self._epoch + cycle * _EPOCHS_APART), NO_BATCH)
        if item is NO_BATCH:
            raise DataError(
                f"{part.name} has no batch for this rank, which reads it together with other loaders: give it at least "
                "one batch for each rank."
            )
        return item

    def assured_batches(self) -> int:
        # Up to the end of the present cycle of the shortest part. The rows after it depend on the mode.
        ends = []
        for number, (begins, part) in enumerate(zip(self._begins, self._parts, strict=True)):
            _, _, before = self._in_part(number, self._began_at, begins[-1])
            ends.append(begins[-1] + part.assured_batches() - before)
        return min(ends)

    def announce_by(self, announce: Callable[[str], None]) -> None:
        super().announce_by(announce)
        for part in self._parts:
            part.announce_by(announce)

    def stop_keeping_state(self) -> None:
        super().stop_keeping_state()
        for part in self._parts:
            part.stop_keeping_state()

    def described(self) -> str | None:
        parts = [part.described() for part in self._parts]
        return "; ".join(str(part) for part in parts) if any(parts) else None

    def position_from(self, began_at: Position | None, batches: int) -> Position:
        places = []
        for number, part in enumerate(self._parts):
            turn, began, count = self._in_part(number, began_at, batches)
            places.append({"cycle": self._first_cycles[number] + turn, "position": part.position_from(began, count)})
        return {"batches": batches, "parts": places}

    def _in_part(self, number: int, began_at: Position | None, batches: int) -> tuple[int, Position | None, int]:
        """Return a part's cycle since the start, the position at which it began, and the batches consumed in it."""
        begins = self._begins[number]
        turn = bisect_right(begins, batches) - 1
        began = self._places(began_at)[number][1] if turn == 0 else None
        return turn, began, self._parts[number].batches_before(began) + batches - begins[turn]

    def state_after(self, batches: int | None) -> Any:
        counts: list[int | None] = [None] * len(self._parts)
        if batches is not None:
            counts = [self._in_part(number, self._began_at, batches)[2] for number in range(len(self._parts))]
        states = [part.state_after(count) for part, count in zip(self._parts, counts, strict=True)]
        return states if any(state is not None for state in states) else None

    def restore(self, states: Sequence[Any], own: bool) -> None:
        whole = [state for state in states if state is not None and len(state) == len(self._parts)]
        for number, part in enumerate(self._parts):
            part.restore([state[number] for state in whole], own)

    def _places(self, position: Position | None) -> list[tuple[int, Position | None]]:
        if position is None:
            return [(0, None)] * len(self._parts)
        if CONVERTED in position:
            turns = [divmod(int(position[CONVERTED]), part.len_batches() or sys.maxsize) for part in self._parts]
            return [(cycle, {CONVERTED: rest}) for cycle, rest in turns]
        places = position.get("parts", ())
        if len(places) != len(self._parts):
            raise CheckpointError(
                f"{self.name} was checkpointed with {len(places)} loaders read in parallel, but there are "
                f"{len(self._parts)} now: a run must resume with the loaders that it was started with."
            )
        return [(place["cycle"], place["position"]) for place in places]


class CombinedEvaluation(EvaluationSource):
    """Several evaluation sources read in parallel: row i of the one-process order goes to rank ``i % size``."""

    def __init__(
        self, parts: list[EvaluationSource], spec: TreeSpec, mode: str, name: str, *, rank: int, size: int
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._parts = parts
        self._spec = spec
        self._mode = mode
        if mode == "max_size_cycle" and any(not part.len_batches() for part in parts):
            raise ConfigurationError(
                f"{name} is a CombinedLoader(mode='max_size_cycle') with a loader without length; an evaluation "
                "distributes batches by number: give each loader a length above 0, or use mode='max_size'."
            )

    def len_batches(self) -> int | None:
        return combined_length(self._mode, [part.len_batches() for part in self._parts])

    def first_batches(self) -> list[str | None]:
        return [mark for part in self._parts for mark in part.first_batches()]

    def start_from(self, first: int, *, epoch: int = 0, limit: int | None = None) -> NumberedBatches:
        numbers: Iterator[int]
        rows: Rows
        if self._mode == "max_size_cycle":
            stop = min(each for each in (self.len_batches(), limit) if each is not None)
            numbers = iter(range(first, stop, self.size))
            rows = zip(*(self._cycle(part, first, epoch) for part in self._parts), strict=False)
        else:
            numbers = itertools.count(first, self.size)
            opened = [self._batches(part.start_from(first, epoch=epoch, limit=limit)) for part in self._parts]
            rows = merge(self._mode, opened, lambda part, cycle: iter(()))
        for number, row in zip(numbers, rows, strict=False):
            yield number, tree_unflatten(row, self._spec)

    def _cycle(self, part: EvaluationSource, first: int, epoch: int) -> Iterator[Any]:
        length = part.len_batches() or 1
        for begin in itertools.count(0, length):
            yield from self._batches(part.start_from((first - begin) % self.size, epoch=epoch))

    @staticmethod
    def _batches(numbered: NumberedBatches) -> Iterator[Any]:
        for _, batch in numbered:
            yield batch
