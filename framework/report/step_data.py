"""Which samples an optimizer step has read, from the marks that a run leaves in its history.

The samples follow from the marks: the order of an epoch is a function of its seed and number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.errors import DataError
from ..core.wording import counted
from ..data.orders import permutation
from ..data.samplers import rank_parts
from ..data.training_source import items_after
from .data_marks import DataMark


@dataclass(frozen=True)
class StepData:
    """The batches of one window, and its samples on each data rank."""

    step: int | None
    """None under manual optimization."""
    epoch: int
    batches: range
    """Global micro-batches, counted from the start of the epoch."""
    applied: bool
    """False if the window made no update: a loss or gradient was not finite, no batch had a loss, or a hook skipped."""
    unit: str
    """Unit of positions and indices: ``samples`` of the dataset, or ``batches`` of a batch sampler or stream."""
    ranks: list[list[int]] | None
    """For each data rank, indices into the dataset; None where only the program knows them."""
    positions: range
    """Positions in the order of the epoch that all ranks read together."""
    order: str
    """How the order is made."""


def data_of_step(marks: Sequence[DataMark], step: int, reached: int) -> list[StepData]:
    """Return the windows of a step, given the steps that the run has reached: those left out, and the applied one.

    Raises:
        DataError: the run has not reached the step, or left no mark for it.
    """
    if not marks:
        raise DataError(
            "the run has left no record of its data: it saves nothing, has no training data yet, or was made by an "
            "earlier version."
        )
    if not 0 <= step < reached:
        raise DataError(f"step {step}: the run has made {counted(reached, 'step')}, which are counted from 0.")
    if not all(mark.counts_steps for mark in marks):
        raise DataError(
            "under manual optimization the program decides how many steps a batch makes: give --epoch and --batch, "
            "which messages name."
        )
    found = []
    for mark, following in _with_following(marks):
        begin = mark.batch + (step - mark.step) * mark.window
        if mark.step <= step and (following is None or step < following.step or _is_left_out(mark, following, begin)):
            found.append(_data(mark, following, begin, mark.window))
    return found


def data_of_batch(marks: Sequence[DataMark], epoch: int, batch: int) -> StepData:
    """Return one global micro-batch of an epoch.

    Raises:
        DataError: the run left no mark for it.
    """
    before = [each for each in _with_following(marks) if each[0].epoch == epoch and each[0].batch <= batch]
    if not before:
        known = sorted({mark.epoch for mark in marks})
        raise DataError(f"epoch {epoch}, batch {batch}: the run has a record of epoch {_spans(known) or 'none'}.")
    mark, following = before[-1]
    if mark.end is not None and batch >= mark.end:
        raise DataError(f"batch {batch}: epoch {epoch} has {counted(mark.end, 'batch')}, counted from 0.")
    return _data(mark, following, batch, 1)


def _with_following(marks: Sequence[DataMark]) -> Iterable[tuple[DataMark, DataMark | None]]:
    return zip(marks, [*marks[1:], None], strict=True)


def _is_left_out(mark: DataMark, following: DataMark | None, begin: int) -> bool:
    """Return whether a window at the step of the following mark made no update. A resumed run has another source."""
    return following is not None and following.source == mark.source and begin < following.batch


def _data(mark: DataMark, following: DataMark | None, begin: int, count: int) -> StepData:
    """Return ``count`` batches of the windows of a mark, from batch ``begin``."""
    source, order = mark.source, mark.source["order"]
    first, span, total = source["first"], source["span"], source["total"]
    batches = range(begin, begin + count if mark.end is None else min(begin + count, mark.end))
    start, stop = (items_after(batch, first, span, total) for batch in (batches.start, batches.stop))
    step = mark.step + (begin - mark.batch) // mark.window
    # A window that made no update is followed by a mark at the same step.
    is_applied = following is None or step < following.step
    ranks = None
    if order["kind"] in ("shuffled", "in order") and source["ranks"] is not None:
        size, length = source["ranks"], order["count"]
        items = range(length) if order["kind"] == "in order" else permutation(length, order["seed"], mark.epoch)
        items = items[:stop]
        ranks = [
            [each for _, _, own in rank_parts(items, start, span, rank, size) for each in own] for rank in range(size)
        ]
    return StepData(
        step if mark.counts_steps else None, mark.epoch, batches, is_applied, source["unit"], ranks,
        range(start, stop), order["kind"],
    )  # fmt: skip


def _spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text: ``0 to 3, 5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
