"""The accumulation window: the micro-batches of one optimizer step, fetched together before its first forward pass.

Because the window is known before the first backward pass, so is the total weight by which its losses are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any

from ..core.accumulation import AccumulationSchedule
from ..core.progress import Progress
from ..distributed.world import World
from .common_stream import compare_streams
from .training_source import NO_BATCH, TrainingSource

_END = object()


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
        self._epoch: int | None = None
        self.resumed_at: dict[str, Any] | None = None
        """The position from a checkpoint at which the next epoch begins; None for its start."""

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
        self._iterator = iter(self.source.start(self._progress.epoch, self.resumed_at))
        self.resumed_at = None

    def take(self) -> tuple[list[Any], int] | None:
        """Return this rank's micro-batches of the next window and the window's size; None at the end of the epoch.

        With several ranks the list may be shorter than the size, or empty, if this rank has run out of data.
        """
        progress = self._progress
        size = self._constant or self.schedule(progress.epoch, progress.global_step)
        if self.end is not None and size > self.end - progress.batch_in_epoch:
            size = self.end - progress.batch_in_epoch
            if size <= 0:
                return None
        if size == 1:
            item = next(self._iterator, _END)
            if item is not _END and not self._several_ranks:
                return [item], 1
            batches = [] if item is _END else [item]
        else:
            batches = list(islice(self._iterator, size))
        if self._several_ranks:
            return [batch for batch in batches if batch is not NO_BATCH], size
        return (batches, len(batches)) if batches else None

    def coming(self, index: int) -> Generator[tuple[Any, int], None, None]:
        """Yield this rank's next batches, without consuming them, and their indices, starting at ``index``.

        Once the generator is closed, ``take`` continues with the first of these batches.
        """
        seen: list[Any] = []
        try:
            while self.end is None or index < self.end:
                item = next(self._iterator, _END)
                if item is _END:
                    return
                seen.append(item)
                if item is not NO_BATCH:
                    yield item, index
                index += 1
        finally:
            self._iterator = chain(seen, self._iterator)

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
