"""``Span``: consecutive items of an epoch, in which the data is counted that a run leaves out.

Items are those of the source, samples or batches, in the order of the epoch that all ranks read together: so a run that
continues on another number of ranks leaves out the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Span:
    """Consecutive items of one epoch."""

    epoch: int
    first: int
    stop: int | None
    """The first item after the span; None for the end of the epoch."""
    unit: str
    """The kind of item, ``samples`` or ``batches``; see ``TrainingSource.layout``."""

    def __str__(self) -> str:
        last = "the end" if self.stop is None else self.stop - 1
        return f"{self.unit} {self.first} to {last} of epoch {self.epoch}"

    @property
    def end(self) -> float:
        """``stop``, or infinity."""
        return float("inf") if self.stop is None else self.stop


def as_json(spans: Iterable[Span]) -> list[list[Any]]:
    """Return spans as JSON values."""
    return [list(astuple(span)) for span in spans]


def from_json(values: Any) -> list[Span]:
    """Return spans from JSON values. Raises ``TypeError`` or ``ValueError`` if they are damaged."""
    return [
        Span(int(epoch), int(first), None if stop is None else int(stop), str(unit))
        for epoch, first, stop, unit in values
    ]


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the same items as spans that do not overlap, in ascending order."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.epoch, each.unit, each.first)):
        last = found[-1] if found else None
        if last is not None and (last.epoch, last.unit) == (span.epoch, span.unit) and span.first <= last.end:
            stop = None if None in (last.stop, span.stop) else int(max(last.end, span.end))
            found[-1] = Span(last.epoch, last.first, stop, last.unit)
        else:
            found.append(span)
    return found


def without(span: Span, others: Iterable[Span]) -> list[Span]:
    """Return the parts of a span that are in none of the others, in ascending order."""
    parts, first = list[Span](), span.first
    for other in joined(each for each in others if (each.epoch, each.unit) == (span.epoch, span.unit)):
        if other.end <= first or other.first >= span.end:
            continue
        if other.first > first:
            parts.append(Span(span.epoch, first, other.first, span.unit))
        if other.stop is None:
            return parts
        first = other.stop
    return [*parts, Span(span.epoch, first, span.stop, span.unit)] if first < span.end else parts
