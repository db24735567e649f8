"""The accumulation window: the micro-batches of one optimizer step, taken as a whole before its first forward.

Because the window is known before the first backward, so is the total weight that its losses are divided by.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import chain, islice
from typing import Any

from ..core.accumulation import AccumulationSchedule
from ..core.progress import Progress
from .training_source import NO_BATCH, TrainingSource

_END = object()


class Windows:
    """Takes windows from a training source, for one run.

    ``full`` is how many micro-batches a whole epoch has, the same number on every rank, and ``end`` where the epoch in
    progress ends; None where the source has to be asked, and an epoch ends when no rank has a batch left.
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
        """The position, of a checkpoint, that the next epoch to begin is within."""

    def use_source(self, source: TrainingSource, full: int | None) -> None:
        """Take windows of another source from now on; ``full`` is its number of batches in an epoch, if known."""
        self.source, self.full = source, full

    def resume(self, position: dict[str, Any], end: int | None) -> None:
        """Have the next epoch begin at a checkpoint's position and end after ``end`` batches, those before included."""
        self.resumed_at, self.end = position, end

    def begin(self) -> None:
        """Start the epoch in progress."""
        if self.resumed_at is None:
            self.end = self.full
        self._epoch = self._progress.epoch
        self._iterator = iter(self.source.start(self._progress.epoch, self.resumed_at))
        self.resumed_at = None

    def take(self) -> tuple[list[Any], int] | None:
        """Return this rank's micro-batches of the next window and how many the window counts; None at the epoch's end.

        With several ranks the list may be shorter than the count, or empty, where this rank's data has run out.
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
        """Yield this rank's next batches of the epoch and their indices, of which the first is ``index``.

        They stay to be taken: once this is closed, ``take`` goes on with the first of them.
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

    def position(self) -> dict[str, Any]:
        """Return where the epoch stands, for a checkpoint."""
        if self.resumed_at is not None:
            return self.resumed_at
        position: dict[str, Any] = self.source.position_after(self._progress.batch_in_epoch)
        return position

    def source_state(self) -> Any:
        """Return the source's own state where the epoch stands, or None where it has none to tell."""
        progress = self._progress
        return self.source.state_after(progress.batch_in_epoch if self._epoch == progress.epoch else None)

    def finish(self) -> None:
        """Read to the end a source that tells its state, at the epoch's end: it may begin anew only then."""
        if self.source.keeps_state and self._progress.batch_in_epoch == self.source.len_batches_now():
            next(self._iterator, None)

    def close(self) -> None:
        """Let go of the iterator and its workers."""
        self._iterator = iter(())
