"""``History``: the values that a fit has logged, as series over optimizer steps whose size is bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .values import as_number

# A series is thinned to half when it reaches this many points, so that it has at least half as many from then on.
MOST_POINTS = 2_000
MOST_SERIES = 200
# Names of the series that phalanx measures itself begin so.
OWN_PREFIX = "phalanx/"
RATE = f"{OWN_PREFIX}steps_per_second"
MEMORY = f"{OWN_PREFIX}memory_bytes"
# Followed by the unit: samples or tokens.
THROUGHPUT = f"{OWN_PREFIX}throughput"
LEARNING_RATE = f"{OWN_PREFIX}learning_rate"


def is_logged(name: str) -> bool:
    """Whether the program logs the values of a name; if not, it is the epoch, or phalanx measures them itself."""
    return name != "epoch" and not name.startswith(OWN_PREFIX)


def rate_name(number: int) -> str:
    """Return the name of the learning rate of an optimizer, given its number."""
    return f"{LEARNING_RATE}-{number}" if number else LEARNING_RATE


@dataclass
class Series:
    """One name: optimizer steps in ascending order, the time of each value in seconds since 1970, and the values."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float, value: float) -> None:
        """Add a value. It replaces values of the same and of later steps, which a resumed fit repeats."""
        if self.steps and self.steps[-1] >= step:
            self.cut(step)
        self.steps.append(step)
        self.times.append(seconds)
        self.values.append(value)
        if len(self.steps) >= MOST_POINTS:
            self._take(thinned(self.values))

    def cut(self, step: int) -> None:
        """Remove the values of ``step`` and later steps."""
        self._take([index for index, at in enumerate(self.steps) if at < step])

    def _take(self, kept: list[int]) -> None:
        self.steps = [self.steps[index] for index in kept]
        self.times = [self.times[index] for index in kept]
        self.values = [self.values[index] for index in kept]


def thinned(values: list[float]) -> list[int]:
    """Return the indices of half of the values: of each four neighbours the smallest and the largest, and the last.

    A curve that is thinned in this way keeps its spikes, which every other value would not.
    """
    kept: list[int] = []
    for start in range(0, len(values) - 1, 4):
        group = range(start, min(start + 4, len(values) - 1))
        finite = [index for index in group if math.isfinite(values[index])] or list(group)
        kept += sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})
    return [*kept, len(values) - 1] if values else []


class History:
    """The series of a fit by name. Names beyond ``MOST_SERIES`` are counted and left out."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.left_out: set[str] = set()

    def add(self, step: int, seconds: float, values: Mapping[str, Any]) -> None:
        """Add the values that were logged at an optimizer step; what is not a number is ignored."""
        for name, value in values.items():
            number = as_number(value)
            if number is None:
                continue
            if name in self.series:
                self.series[name].add(step, seconds, number)
            elif len(self.series) < MOST_SERIES:
                self.series[name] = Series([step], [seconds], [number])
            elif len(self.left_out) < MOST_SERIES:
                self.left_out.add(name)

    def cut(self, step: int) -> None:
        """Remove the values of ``step`` and later steps: a resumed fit logs them again."""
        for series in self.series.values():
            series.cut(step)

    def rows(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Yield the values as rows in the order of steps: the step, the time, and the values by name."""
        points = sorted(
            (step, seconds, name, value)
            for name, series in self.series.items()
            for step, seconds, value in zip(series.steps, series.times, series.values, strict=True)
        )
        row: tuple[int, float, dict[str, float]] | None = None
        for step, seconds, name, value in points:
            if row is None or row[:2] != (step, seconds):
                if row is not None:
                    yield row
                row = (step, seconds, {})
            row[2][name] = value
        if row is not None:
            yield row

    def count(self) -> int:
        """Return the number of values of all series."""
        return sum(len(series.steps) for series in self.series.values())

    def latest(self) -> dict[str, float]:
        """Return the newest value of each name."""
        return {name: series.values[-1] for name, series in self.series.items() if series.values}
