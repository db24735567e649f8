"""Sources of training data: one rank's batches of an epoch, from any position of the epoch.

Terms in this folder:

    item                 a sample; or a batch, where the loader itself decides what is in one (``batch_size=None``, a
                         ``batch_sampler`` of the user's, an iterable)
    order                the items of an epoch, in the sequence in which one process reads them
    width                the number of items in a batch of one rank
    span                 the number of consecutive items that all ranks read together, in a global micro-batch or a
                         global batch. (A ``Span`` is a range of items that a run does not train on.)
    global micro-batch   the batches that all ranks read together: ``width`` items of the order for each rank
    global batch         all items of an optimizer step, where ``global_batch_size`` fixes their number
    part                 the items of a global micro-batch, or of a global batch, that one rank reads: the r-th
                         contiguous part of them is that of rank r
    batch                in counts and positions: a global micro-batch, or a global batch where its size is fixed;
                         ``Progress.global_batch`` counts those of the whole run
    window               the micro-batches of one optimizer step

A position in the data, from the training loop to a sample:

    ``Progress.batch_in_epoch``            batches that the loop has consumed; batches that were read ahead do not count
    ``TrainingSource.position_after``      the items in them, such as ``{"samples": 640}``, for a checkpoint. It is the
                                           same for any number of ranks and any batch size
    ``TrainingSource.start``               the batches that follow a position
    ``TrainingSampler.read_from``          the first item to read, ``items_before(position)``
    ``SeededBatch``                        in worker processes, each sample is fetched with generators that are seeded
                                           by its place in the order, so that any worker draws the same numbers

The source of a loader (``prepare_training``):

    ``DataLoader`` over a map-style dataset        ``MapSource``; ``GlobalBatchSource`` with a fixed global batch size
    any other ``DataLoader``, any other iterable   ``IterableSource``, of which each rank takes every n-th batch
    collection of loaders, ``CombinedLoader``      ``CombinedTraining``, made of the sources of its loaders
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from ..core.errors import CheckpointError, ConfigurationError
from ..core.wording import counted
from ..distributed.data_parallel import ceil_div

Position = dict[str, Any]
"""The consumed part of an epoch, in JSON values."""

CONVERTED = "global_batches"
"""The key of a position from a checkpoint of another framework: batches per rank, with this run's batch size."""


@final
class NoBatch:
    """The type of ``NO_BATCH``."""

    def __repr__(self) -> str:
        return "NO_BATCH"


NO_BATCH: Final = NoBatch()
"""Yielded by a source if other ranks have a part of the global micro-batch and this rank has none."""


class TrainingSource(ABC):
    """The data source of the training loop. Batches are counted as global micro-batches: one on every rank.

    An epoch that is resumed on another number of ranks, or with another batch size, continues at the same sample. Its
    batches are then counted from ``batches_before(position)``, in the present layout.
    """

    name: str
    keeps_state: bool = False
    """Whether the user's loader or dataset is stateful, so that a resumed run need not read consumed batches again."""
    started: bool = False
    """Whether an epoch was started in this process."""
    _began_at: Position | None = None

    def stop_keeping_state(self) -> None:
        """Save no state of the loader any more: it holds values that a checkpoint cannot hold."""
        self.keeps_state = False

    def __init__(self) -> None:
        self.announce: Callable[[str], None] = _say_nothing

    def announce_by(self, announce: Callable[[str], None]) -> None:
        """Call ``announce`` with messages for the console about operations that take long."""
        self.announce = announce

    @property
    def micro_batch_size(self) -> int | None:
        """The number of samples in a full micro-batch on one rank, or None if unknown."""
        return None

    @property
    def global_batch_size(self) -> int | None:
        """The number of samples of a batch over all ranks, if a batch is a window of micro-batches; else None."""
        return None

    @abstractmethod
    def len_batches(self, position: Position | None = None) -> int | None:
        """Return the number of batches in an epoch, those before ``position`` included, or None if unknown."""

    @abstractmethod
    def batches_before(self, position: Position | None) -> int:
        """Return the number of batches that ``position`` counts as consumed."""

    def items_before(self, position: Position | None) -> int:
        """Return the items, as ``layout`` counts them, that ``position`` counts as consumed."""
        return self.batches_before(position)

    def assured_batches(self) -> int:
        """Return a number of batches of which this rank has each one, however short its data may be after them.

        They are counted from the start of the epoch that was opened last, ``batches_before`` of its position included.
        0 if that is not certain before they are read.
        """
        return 0

    @abstractmethod
    def open(self, epoch: int, position: Position | None) -> Iterator[Any]:
        """Return the batches of ``start``."""

    def state_after(self, batches: int | None) -> Any:
        """Return the state of a stateful loader or dataset after ``batches`` batches of the epoch, else None.

        With ``batches=None``, return the state between two epochs.
        """
        return None

    def restore(self, states: Sequence[Any], own: bool) -> None:
        """Restore, for the next ``start``, states from ``state_after``: this rank's (``own``), or those of all former
        ranks."""

    @abstractmethod
    def position_from(self, began_at: Position | None, batches: int) -> Position:
        """Return the position after ``batches`` batches of an epoch that was started at ``began_at``."""

    def first_batches(self) -> list[str | None]:
        """Return a fingerprint for each iterable that all ranks read in common: of its first batch, None before."""
        return []

    def described(self) -> str | None:
        """Return a human-readable description of an epoch, or None if unknown; the same for any number of ranks."""
        return None

    def layout(self) -> dict[str, Any]:
        """Return, in JSON values, what it takes to say which samples a batch of the epoch started last holds.

        ``unit``: what an item is, ``samples`` or ``batches``; ``first``: items before the position at which the epoch
        was started; ``span``: items in a global micro-batch; ``total``: items in the epoch, None if unknown; ``ranks``:
        data ranks that share the items of a global micro-batch, None if they do not; ``order``: see ``Order.layout``.
        """
        return {
            "unit": "batches", "first": self.items_before(self._began_at), "span": 1, "total": None, "ranks": None,
            "order": {"kind": self.name},
        }  # fmt: skip

    def start(self, epoch: int, position: Position | None = None) -> Iterator[Any]:
        """Yield this rank's batches, or ``NO_BATCH`` if it has none, beginning at ``position``.

        Batches before the position that must be skipped are read before this method returns.
        """
        self._began_at, self.started = position, True
        return self.open(epoch, position)

    def len_batches_now(self) -> int | None:
        """Return the number of batches in the epoch that was started last, or None if unknown."""
        return self.len_batches(self._began_at)

    def position_after(self, batches: int) -> Position:
        """Return the position after ``batches`` batches of the epoch that was started last."""
        return self.position_from(self._began_at, batches)


def items_after(batches: int, first: int, span: int, total: int | None) -> int:
    """Return the consumed items after ``batches`` global micro-batches of an epoch.

    Args:
        batches: global micro-batches, counted from the start of the epoch.
        first: items before the position at which the epoch was started, which its batches begin at.
        span: items in a global micro-batch.
        total: items in the epoch; None if unknown.
    """
    items = first + (batches - ceil_div(first, span)) * span
    return items if total is None else min(items, max(total, first))


class CountedSource(TrainingSource):
    """A source whose position is one number: the consumed items of the one-process order."""

    def __init__(self, name: str, unit: str, span: int) -> None:
        """``unit``: the kind of item, "samples" or "batches"; ``span``: the number of items in a global micro-batch."""
        super().__init__()
        self.name = name
        self.unit = unit
        self.span = span

    def layout(self) -> dict[str, Any]:
        first, total = self.items_before(self._began_at), self.total_items()
        return {**super().layout(), "unit": self.unit, "first": first, "span": self.span, "total": total}

    def batches_before(self, position: Position | None) -> int:
        return ceil_div(self.items_before(position), self.span)

    def items_before(self, position: Position | None) -> int:
        """Return the items that ``position`` counts as consumed.

        Raises:
            CheckpointError: the position counts another unit.
        """
        if position is None:
            return 0
        if CONVERTED in position:
            return int(position[CONVERTED]) * self.span
        if self.unit not in position:
            raise CheckpointError(
                f"{self.name} was checkpointed at {position}, but the loader given now counts {self.unit}: "
                "a run must resume with the kind of loader that it was started with."
            )
        return int(position[self.unit])

    def position_from(self, began_at: Position | None, batches: int) -> Position:
        first = self.items_before(began_at)
        return {self.unit: items_after(batches, first, self.span, self.total_items())}

    def total_items(self) -> int | None:
        """Return the number of items in an epoch, or None if it is not known exactly."""
        return None


def _say_nothing(text: str) -> None:
    """Ignore a message: the default of ``announce_by``."""


def require_batches(source: TrainingSource, loader: Any, size: int) -> TrainingSource:
    """Return the source of a loader for ``size`` ranks.

    Raises:
        ConfigurationError: it has no batch.
    """
    if source.len_batches() == 0:
        raise ConfigurationError(
            f"{source.name} yields no batch on {counted(size, 'rank')}"
            + (", and its drop_last drops a short global batch" if getattr(loader, "drop_last", False) else "")
            + "; training needs at least one: check the dataset's length and the batch size."
        )
    return source
