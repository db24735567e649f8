"""Which samples an optimizer step has read, from the marks that a run leaves in its history.

The samples follow from the marks: the order of an epoch is a function of its seed and number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.errors import DataError
from ..core.wording import counted
from ..data.orders import permutation
from ..distributed.data_parallel import ceil_div, part_of
from .data_marks import DataMark


@dataclass(frozen=True)
class StepData:
    """The batches of one window, and its samples on each data rank."""

    step: int
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
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        if mark.step > step:
            break
        last = mark.step + 1 if following is None else following.step
        if following is None or step < following.step:
            begin = mark.batch + (step - mark.step) * mark.window
            found.append(_window(mark, step, begin, True))
        elif following.step == step and following.epoch == mark.epoch:
            # A window that made no update is followed by a mark at the same step.
            begin = mark.batch + (last - mark.step) * mark.window
            if begin < following.batch:
                found.append(_window(mark, step, begin, False))
    return found


def data_of_batch(marks: Sequence[DataMark], epoch: int, batch: int) -> StepData:
    """Return one global micro-batch of an epoch.

    Raises:
        DataError: the run left no mark for it.
    """
    before = [mark for mark in marks if mark.epoch == epoch and mark.batch <= batch]
    if not before:
        known = sorted({mark.epoch for mark in marks})
        raise DataError(
            f"epoch {epoch}, batch {batch}: the run has a record of the epochs {_spans(known) or 'of none'}."
        )
    mark = before[-1]
    if mark.end is not None and batch >= mark.end:
        raise DataError(f"batch {batch}: epoch {epoch} has {counted(mark.end, 'batch')}, counted from 0.")
    return _data(mark, mark.step, range(batch, batch + 1), True)


def _window(mark: DataMark, step: int, begin: int, applied: bool) -> StepData:
    end = begin + mark.window
    return _data(mark, step, range(begin, end if mark.end is None else min(end, mark.end)), applied)


def _data(mark: DataMark, step: int, batches: range, applied: bool) -> StepData:
    source = mark.source
    first, span = int(source["first"]), int(source["span"])

    def items_before(batch: int) -> int:
        items = first + (batch - ceil_div(first, span)) * span
        return items if source["total"] is None else min(items, int(source["total"]))

    positions = range(items_before(batches.start), items_before(batches.stop))
    order = source["order"]
    ranks: list[list[int]] | None = None
    if order["kind"] in ("shuffled", "in order") and source["ranks"] is not None:
        items = permutation(order["count"], order["seed"], mark.epoch) if order["kind"] == "shuffled" else None
        ranks = [[] for _ in range(source["ranks"])]
        for start in range(positions.start, positions.stop, span):
            count = min(span, positions.stop - start)
            for rank, own in enumerate(ranks):
                begin, end = part_of(count, rank, len(ranks))
                places = range(start + begin, start + end)
                own += places if items is None else (int(items[place]) for place in places)
    return StepData(step, mark.epoch, batches, applied, source["unit"], ranks, positions, str(order["kind"]))


def _spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text: ``0 to 3, 5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
