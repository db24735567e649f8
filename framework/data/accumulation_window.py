"""The accumulation window: the micro-batches of one optimizer step.

The losses of a window are divided by its total weight over all ranks, which is reduced before the first backward pass.
So the number of a rank's micro-batches must be known before its first forward pass. Where the length of the data
assures it, each micro-batch is fetched just before its own forward pass, while a device still computes the previous
one. Otherwise all are fetched first, and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

from ..core.accumulation import AccumulationSchedule
from ..core.data_spans import Span, joined
from ..core.errors import DataError
from ..core.progress import Progress
from ..distributed.seed import Generators, restore
from ..distributed.world import World
from .common_stream import compare_streams
from .global_batches import GlobalBatchSource
from .training_source import NO_BATCH, TrainingSource, items_after

_END = object()
Window = tuple["MicroBatches", int, Sequence[float] | None]
"""The arguments of a training step: micro-batches, size, and the samples of each micro-batch where these are parts of a
global batch, else None."""


class MicroBatches(Protocol):
    """The micro-batches of a window on this rank, such as a list. They are iterated over once."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


class FetchedInTurn:
    """A number of micro-batches that are fetched while they are iterated over."""

    def __init__(self, fetch: Callable[[], Any], count: int) -> None:
        self._fetch = fetch
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield self._fetch()


class ExcludedItems:
    """Answers whether a window of the epoch in progress has items that the run does not train on.

    Args:
        spans: the excluded items of the epoch.
        layout: that of the source, which has started the epoch.

    Raises:
        DataError: the spans count other items than the source does.
    """

    def __init__(self, spans: Sequence[Span], layout: dict[str, Any]) -> None:
        self._spans = spans
        self._first, self._span, self._total = layout["first"], layout["span"], layout["total"]
        for span in spans:
            if span.unit != layout["unit"]:
                raise DataError(
                    f"the run leaves out {span}, but the loader given now counts {layout['unit']}: a run must resume "
                    "with the kind of loader that it was started with."
                )

    def touches(self, batch: int, count: int) -> bool:
        """Whether the window of ``count`` global micro-batches after ``batch`` has excluded items.

        It may have others too: on another number of ranks, windows begin at other items.
        """
        first, stop = (items_after(each, self._first, self._span, self._total) for each in (batch, batch + count))
        return any(span.first < stop and first < span.end for span in self._spans)


class Windows:
    """Takes windows from a training source, for one run.

    ``full`` is the number of micro-batches in a complete epoch, the same on every rank; ``end`` is the number after
    which the epoch in progress ends. Both are ``None`` if the length is unknown: the epoch then ends when no rank has a
    batch left.
    """

    def __init__(
        self,
        source: TrainingSource,
        schedule: AccumulationSchedule,
        progress: Progress,
        full: int | None,
        world_size: int,
    ) -> None:
        self.source = source
        self.schedule = schedule
        self.full = self.end = full
        self._constant = schedule.constant
        self._progress = progress
        self._several_ranks = world_size > 1
        self._iterator: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        """Batches that were read from the iterator, but not consumed."""
        self._assured_until = 0
        """This rank certainly has a part of each batch of the epoch before this one; see ``assured_batches``. 0 if that
        is not known before they are read."""
        self._epoch: int | None = None
        self._taken = self._constant or 0
        """The size of the window that was taken last."""
        self._observers: list[Callable[[Windows], None]] = []
        self.excluded_spans: list[Span] = []
        """The data that this run does not train on."""
        self.resumed_at: dict[str, Any] | None = None
        """The position from a checkpoint at which the next epoch begins; None for its start."""

    @property
    def found_size(self) -> int | None:
        """The size of micro-batches that was found during training; None where it is given."""
        return None

    @property
    def step_samples(self) -> int | None:
        """The number of samples that a rank reads for the next optimizer step; None if unknown, or if it is given."""
        size, progress = self.source.micro_batch_size, self._progress
        if size is None or self.source.global_batch_size is not None:
            return None
        return size * self.schedule(progress.epoch, progress.global_step)

    def use_source(self, source: TrainingSource, full: int | None) -> None:
        """Switch to another source; ``full`` is its number of batches per epoch, if known."""
        self.source, self.full = source, full

    def resume(self, position: dict[str, Any], end: int | None) -> None:
        """Make the next epoch begin at a checkpoint's position and end after ``end`` batches, counted from the epoch's
        start."""
        self.resumed_at, self.end = position, end

    def begin(self) -> None:
        """Start the epoch in progress."""
        if self.resumed_at is None:
            self.end = self.full
        self._epoch = self._progress.epoch
        self._ahead.clear()
        self._iterator = iter(self.source.start(self._progress.epoch, self.resumed_at))
        self._assured_until = self.source.assured_batches()
        self.resumed_at = None
        self._taken = self.size
        self.notify_observers()

    def exclude(self, spans: Iterable[Span]) -> None:
        """Do not train on this data, in addition to what is excluded already."""
        self.excluded_spans = joined([*self.excluded_spans, *spans])

    def excluded_in_epoch(self) -> ExcludedItems | None:
        """Return what is excluded of the epoch in progress; None if nothing is.

        Raises:
            DataError: it counts other items than the source does.
        """
        spans = [span for span in self.excluded_spans if span.epoch == self._progress.epoch]
        return ExcludedItems(spans, self.source.layout()) if spans else None

    def observe(self, function: Callable[[Windows], None]) -> None:
        """Call a function with these windows in each ``notify_observers``."""
        self._observers.append(function)

    def notify_observers(self) -> None:
        """Report that steps and batches have another ratio from the present progress on, or that an epoch begins."""
        for observe in self._observers:
            observe(self)

    @property
    def size(self) -> int:
        """The number of global micro-batches in the next window, unless the epoch ends before."""
        return self._constant or self.schedule(self._progress.epoch, self._progress.global_step)

    def _scheduled(self) -> int:
        size = self.size
        if size != self._taken:
            self._taken = size
            self.notify_observers()
        return size

    def take(self) -> Window | None:
        """Return the next window: this rank's micro-batches, and their number on a rank that has data for all of them.

        The first micro-batch is in memory. The others are too where they had to be counted, else they are fetched in
        turn. With several ranks there may be fewer than the size, or none, if this rank has run out of data: the step
        finds out whether any rank has some.

        Returns:
            None at the end of the epoch, if this rank knows it by itself: by the length of the data, or on one rank.
        """
        progress, ahead = self._progress, self._ahead
        size = self._constant or self._scheduled()
        if self.end is not None and size > self.end - progress.batch_in_epoch:
            size = self.end - progress.batch_in_epoch
            if size <= 0:
                return None
        if size == 1:
            item = ahead.popleft() if ahead else next(self._iterator, _END)
            if self._several_ranks:
                if item is _END and self.assures(1):
                    raise self._ended_early()
                return ([] if item is _END or item is NO_BATCH else [item]), 1, None
            return None if item is _END else ([item], 1, None)
        if not ahead and self.assures(size):
            ahead.append(self.fetch())
            return FetchedInTurn(self.fetch, size), size, None
        count = self._read_ahead(size)
        if self._several_ranks:
            return FetchedInTurn(self.fetch, count), size, None
        return (FetchedInTurn(self.fetch, count), count, None) if count else None

    def assures(self, count: int) -> bool:
        """Whether this rank certainly has a batch for each of the next ``count`` micro-batches of the epoch."""
        return self._progress.batch_in_epoch + count <= self._assured_until

    def fetch(self) -> Any:
        """Return this rank's next batch.

        Raises:
            DataError: there is none, though the length of the data has assured it.
        """
        item = self._ahead.popleft() if self._ahead else next(self._iterator, _END)
        if item is _END:
            raise self._ended_early()
        return item

    def _ended_early(self) -> DataError:
        return DataError(
            f"{self.source.name} ended within an epoch, before the {self._assured_until} batches that its sampler "
            "gives this rank: make sure that its dataset and collate_fn raise no StopIteration."
        )

    def _read_ahead(self, size: int) -> int:
        """Read the next ``size`` batches without consuming them; return how many of them this rank has."""
        own, is_assured = [], self.assures(size)
        for _ in range(size):
            item = self._ahead.popleft() if self._ahead else next(self._iterator, _END)
            if item is _END:
                if is_assured:
                    raise self._ended_early()
                break
            if item is not NO_BATCH:
                own.append(item)
        self._ahead.extendleft(reversed(own))
        # A loader that was read to its end may have been started again.
        self._assured_until = self.source.assured_batches()
        return len(own)

    def coming(self, index: int) -> Generator[tuple[Any, int], None, None]:
        """Yield this rank's next batches, without consuming them, and their indices, starting at ``index``."""
        place = 0
        while self.end is None or index < self.end:
            if place == len(self._ahead):
                item = next(self._iterator, _END)
                if item is _END:
                    return
                self._ahead.append(item)
            if self._ahead[place] is not NO_BATCH:
                yield self._ahead[place], index
            index, place = index + 1, place + 1

    def compare_ranks(self, world: World, note: Callable[[str], None]) -> None:
        """Report a source from which the ranks read different batches. Reads this rank's first batch. Collective."""
        if self._several_ranks and self.source.first_batches():
            with closing(self.coming(self._progress.batch_in_epoch)) as coming:
                next(coming, None)
            compare_streams(world, self.source, note)

    def position(self) -> dict[str, Any]:
        """Return the position within the epoch, for a checkpoint."""
        if self.resumed_at is not None:
            return self.resumed_at
        position: dict[str, Any] = self.source.position_after(self._progress.batch_in_epoch)
        return position

    def source_state(self) -> Any:
        """Return the source's own state at the present position, or None if it has no state."""
        progress = self._progress
        return self.source.state_after(progress.batch_in_epoch if self._epoch == progress.epoch else None)

    def finish(self) -> None:
        """Exhaust a stateful source at the end of the epoch: only then can it start again."""
        if self.source.keeps_state and self._progress.batch_in_epoch == self.source.len_batches_now():
            next(self._iterator, None)

    def close(self) -> None:
        """Release the iterator and its workers."""
        self._iterator = iter(())
        self._ahead.clear()

    def release(self) -> None:
        """Release the source as well; no further epoch can begin."""
        self.close()
        del self.source


class GlobalWindows(Windows):
    """Takes windows from a source of global batches, each of which is a window and counts as one batch."""

    @property
    def size(self) -> int:
        return 1

    def assures(self, count: int) -> bool:
        """Return False: ranks have different numbers of micro-batches of a global batch."""
        return False

    def take(self) -> Window | None:
        """Return this rank's micro-batches of the next global batch; None at the end of the epoch.

        Returns:
            The micro-batches; the number of them on the rank that has the most; the samples of each.
        """
        if self.end is not None and self._progress.batch_in_epoch >= self.end:
            return None
        item: Any = self._ahead.popleft() if self._ahead else next(self._iterator, _END)
        if item is not _END:
            return item, item.longest, item.sizes
        return ([], 1, ()) if self._several_ranks else None

    def coming(self, index: int) -> Generator[tuple[Any, int], None, None]:
        """Yield this rank's next micro-batches, without consuming them, and the indices of their global batches."""
        for item, place in super().coming(index):
            for batch in item.read_all():
                yield batch, place


class RepeatableWindows(GlobalWindows):
    """Takes global batches; can take the newest one again, with the same random numbers, in smaller micro-batches."""

    source: GlobalBatchSource
    _progress: Progress
    _generators: Generators
    _is_cut = False

    @property
    def micro_batch_size(self) -> int:
        """The number of samples in a micro-batch of one rank."""
        return self.source.micro_batch_size

    @property
    def found_size(self) -> int | None:
        return self.source.micro_batch_size

    def start_with(self, size: int) -> None:
        """Begin with micro-batches of this size, but at most the rank's part of a global batch."""
        self.source.cut_into(min(size, self.micro_batch_size))

    def use_source(self, source: TrainingSource, full: int | None) -> None:
        assert isinstance(source, GlobalBatchSource)
        source.cut_into(self.micro_batch_size)
        super().use_source(source, full)

    def halve(self) -> None:
        """Halve the micro-batches from the next window on, or in the one that is repeated."""
        self.source.cut_into(max(1, self.micro_batch_size // 2))
        self._is_cut = True

    def begin(self) -> None:
        super().begin()
        self._is_cut = False

    def take(self) -> Window | None:
        if self._is_cut:
            self._reopen()
        # Before the first batch is read: a dataset without workers draws from these generators.
        self._generators = Generators()
        return super().take()

    def repeat(self) -> Window | None:
        """Take the newest global batch again, with the random generators as they were before it was read."""
        restore(self._generators.state())
        self._reopen()
        return self.take()

    def _reopen(self) -> None:
        """Read the epoch from its present position, as a fit does that is resumed there."""
        self._is_cut = False
        # Released first, so that workers are not started beside those of before.
        self.close()
        self._iterator = iter(self.source.start(self._progress.epoch, self.position()))
