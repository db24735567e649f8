"""``RepeatableWindows``: global batches that can be taken again, in smaller micro-batches."""

from __future__ import annotations

from ..core.progress import Progress
from ..distributed.seed import Generators, restore
from .accumulation_window import GlobalWindows, Window
from .global_batches import GlobalBatchSource
from .training_source import TrainingSource


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
