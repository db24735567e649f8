"""``DataMark``: where in the data a run of optimizer steps begins, from the history of a run.

A fit leaves a mark at the start of each epoch, and wherever steps and batches have no fixed ratio from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST_MARKS = 20_000


@dataclass(frozen=True)
class DataMark:
    """The position at which steps begin that take a window of batches each."""

    step: int
    """Optimizer steps before it."""
    epoch: int
    batch: int
    """Global micro-batches of the epoch before it: one on every rank."""
    window: int
    """Global micro-batches in a step."""
    end: int | None
    """Global micro-batches in the epoch; None if unknown."""
    counts_steps: bool
    """False under manual optimization, where the program decides how many steps a batch makes."""
    source: dict[str, Any]
    """``TrainingSource.layout``."""

    @classmethod
    def parse(cls, value: dict[str, Any]) -> DataMark:
        """Read a mark from JSON values. Raises ``KeyError``, ``TypeError`` or ``ValueError`` if it is damaged."""
        end, source = value["end"], value["source"]
        step, epoch, batch, window = (int(value[name]) for name in ("step", "epoch", "batch", "window"))
        end = None if end is None else int(end)
        return cls(step, epoch, batch, window, end, bool(value["counts_steps"]), dict(source))

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the batch."""
        return self.epoch, self.batch


def add_mark(marks: list[DataMark], value: dict[str, Any]) -> None:
    """Add a mark to ascending ones, in place of those that are not before it: a resumed run repeats them.

    The source of one that has none is that of the mark before it. Raises as ``DataMark.parse``, and ``IndexError``.
    """
    if value["source"] is None:
        value = {**value, "source": marks[-1].source}
    new = DataMark.parse(value)
    # From the end: a run of many epochs has a mark for each, and searching all of them took seconds at its restart.
    while marks and marks[-1].position >= new.position:
        marks.pop()
    marks.append(new)
    del marks[:-MOST_MARKS]


def written(marks: Sequence[DataMark]) -> Iterator[dict[str, Any]]:
    """Yield the JSON values of marks, each source once."""
    before: DataMark | None = None
    for mark in marks:
        is_same = before is not None and mark.source == before.source
        yield {**vars(mark), "source": None if is_same else mark.source}
        before = mark
