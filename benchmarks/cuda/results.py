"""The results of all groups, and the bars that they are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .cells import ALL_SIDES
from .cohort import Record
from .measures import added_microseconds, speed_ratio

_BARRED = ("phalanx", "phalanx Fabric", "phalanx ddp", "phalanx fsdp")
_SPEED, _WAITS, _MICROSECONDS = 0.99, 0.0, 30.0


@dataclass
class Results:
    """All that was measured.

    Attributes:
        problems: groups that are missing, with the reason.
        is_judged: whether the bars mean something: on a GPU, with models of the sizes that are named.
    """

    is_judged: bool = True
    machine: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of(self, size: str, compiled: bool, sides: Sequence[str]) -> list[Record]:
        """Return the first record of each side of a size, in the order of the sides."""
        found = [record for record in self.records if (record.size, record.compiled) == (size, compiled)]
        firsts: dict[str, Record] = {}
        for record in found:
            firsts.setdefault(record.side, record)
        return [firsts[side] for side in sides if side in firsts]

    def beside(self, record: Record, side: str) -> Record | None:
        """Return the record of a side that took turns with a record; None if either was not measured."""
        found = [one for one in self.records if one.cohort == record.cohort and one.side == side]
        complete = found and found[0].seconds and len(found[0].seconds) == len(record.seconds)
        return found[0] if complete else None

    def reference(self, record: Record) -> Record | None:
        """Return the record that a record is compared with."""
        return self.beside(record, ALL_SIDES[record.side].reference)

    def as_json(self) -> dict[str, Any]:
        """Return all of it, with the bars."""
        return asdict(self) | {"bars": [asdict(bar) | {"passes": bar.passes} for bar in bars(self)]}


@dataclass(frozen=True)
class Bar:
    """A value that phalanx promises to keep to; None as ``value`` if it was not measured."""

    title: str
    value: float | None
    limit: float
    is_minimum: bool = False
    is_judged: bool = True

    @property
    def passes(self) -> bool | None:
        """Whether the value keeps to the limit; None if it was not measured, or means nothing."""
        if self.value is None or not self.is_judged:
            return None
        return self.value >= self.limit if self.is_minimum else self.value <= self.limit


def bars(results: Results) -> list[Bar]:
    """Return the bars of speed, waits and cost of the host, for each side that has them."""
    found = [bar for compiled in (False, True) for bar in _speeds(results, compiled)]
    for record in results.of("350m", False, _BARRED):
        found.append(Bar(f"350m, {record.side}: waits of the host in a step", waits_of(record), _WAITS))
    for record in results.of("small", False, _BARRED):
        reference = results.reference(record)
        added = added_microseconds(reference.seconds, record.seconds) if reference else None
        title = f"small, {record.side}: µs of a step over {ALL_SIDES[record.side].reference}"
        found.append(Bar(title, added, _MICROSECONDS))
    return [replace(bar, is_judged=results.is_judged) for bar in found]


def _speeds(results: Results, compiled: bool) -> Iterator[Bar]:
    for record in results.of("350m", compiled, _BARRED):
        reference = results.reference(record)
        ratio = speed_ratio(reference.seconds, record.seconds) if reference else None
        title = f"350m{' compiled' if compiled else ''}, {record.side}: speed of {ALL_SIDES[record.side].reference}"
        yield Bar(title, ratio, _SPEED, is_minimum=True)


def waits_of(record: Record) -> float | None:
    """Return the waits of a step: the larger of what torch's debug mode and the profiler have counted."""
    counts = [] if record.waits is None else [record.waits]
    if record.profile is not None:
        counts.append(sum(record.profile["waits"].values()))
    return max(counts, default=None)


def median(values: Sequence[float], scale: Callable[[float], float] = lambda value: value) -> float | None:
    """Return the median of scaled values; None if there are no values."""
    return scale(statistics.median(values)) if values else None
