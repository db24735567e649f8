"""``EpochTable``: a row for each epoch of a fit, as lines of text that fit a terminal, and as HTML for a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from ..framework.metrics.monitor import is_better
from ..framework.profiling.throughput import Throughput

_LEAST_WIDTH = 9
_MARK = "*"
_UNITS = {"tokens": "tok/s", "samples": "samples/s"}
_MEASURED = _SECONDS, _SPEED = "s/epoch", "samples/s"
"""The columns after the metrics."""


@dataclass(frozen=True)
class EpochRow:
    """One epoch. The value of a metric that has none of this epoch is ``None``."""

    epoch: int
    step: int
    """Optimizer steps of the fit so far."""
    metrics: Mapping[str, float | None]
    """Metrics of training, then those of validation."""
    seconds: float
    """Of the entire epoch, with its validations."""
    speed: Throughput | None


@dataclass
class _Layout:
    """The columns of a table between the optimizer step and the mark of the best epoch."""

    metrics: list[str]
    measured: list[str]
    """A part of ``_MEASURED``."""


class Best:
    """The best value of a metric so far.

    Args:
        name: the metric; None for no metric.
        mode: ``"min"`` or ``"max"``.
        value: the best value of earlier epochs, of a resumed fit.
    """

    def __init__(self, name: str | None = None, mode: str = "min", value: float | None = None) -> None:
        self.name = name
        self._mode = mode
        self._value = value

    def improves(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether an epoch has the best value so far; a value that is not finite never is."""
        # The value of the epoch of a metric that is logged for steps, too, has this suffix.
        value = None if self.name is None else metrics.get(self.name, metrics.get(f"{self.name}_epoch"))
        # Compared with NaN, no later value would be better.
        if value is None or not math.isfinite(value):
            return False
        if self._value is not None and not is_better(value, self._value, self._mode):
            return False
        self._value = value
        return True


class EpochTable:
    """The epochs of a fit.

    Args:
        best: the metric whose best epochs are marked.
    """

    def __init__(self, best: Best) -> None:
        self._best = best
        self._rows: list[tuple[EpochRow, bool]] = []
        self._unit = "samples"
        """The unit of the last speed that was measured."""
        self._shown: list[str] = []
        """The metrics of the header that is on the screen."""
        self._header = ""
        self._widths: dict[str, int] = {}
        """The width of each column by its title. It grows with the values, and never shrinks."""

    def add(self, row: EpochRow) -> None:
        self._rows.append((row, self._best.improves(row.metrics)))
        if row.speed is not None:
            self._unit = row.speed.unit

    def __len__(self) -> int:
        return len(self._rows)

    def lines(self, columns: int | None) -> list[str]:
        """Return the last row, below a header if that on the screen does not fit it: for a new metric or a wider value.

        Args:
            columns: the width of the terminal. Where it has no room for all, the last metrics are left out first, then
                the speed and the seconds, and last the metric whose best epochs are marked. None for no limit.
        """
        row, is_best = self._rows[-1]
        # A metric that was shown keeps its column in epochs without a value.
        layout = _Layout([*dict.fromkeys([*self._shown, *row.metrics])], [*_MEASURED])
        for title, cell in zip(self._titles(layout), self._cells(row, is_best, layout), strict=True):
            self._widths[title] = max(self._widths.get(title, _width(title)), len(cell))
        self._fit(layout, columns)
        titles = self._titles(layout)
        widths = [self._widths[title] for title in titles]
        header, line = _aligned(titles, widths), _aligned(self._cells(row, is_best, layout), widths)
        if header == self._header:
            return [line]
        self._header, self._shown = header, layout.metrics
        return [header, line]

    def _fit(self, layout: _Layout, columns: int | None) -> None:
        """Leave out columns for which a terminal has no room; the metric whose best epochs are marked is the last."""
        kept = self._best.name
        while columns is not None and sum(self._widths[title] + 2 for title in self._titles(layout)) - 1 > columns:
            others = [name for name in layout.metrics if kept not in (name, _title(name))]
            if others:
                layout.metrics.remove(others[-1])
            elif layout.measured:
                layout.measured.pop()
            elif layout.metrics:
                layout.metrics.pop()
            else:
                break

    def html(self, most: int | None = None) -> str:
        """Return the table as HTML, without styles of its own: the last rows if there are more than ``most``."""
        if not self._rows:
            return ""
        rows = self._rows if most is None else self._rows[-most:]
        layout = _Layout([*dict.fromkeys(name for row, _ in rows for name in row.metrics)], [*_MEASURED])
        parts = [_html_row("th", self._titles(layout))]
        parts += [_html_row("td", self._cells(row, is_best, layout)) for row, is_best in rows]
        return f"<table>{''.join(parts)}</table>"

    def _titles(self, layout: _Layout) -> list[str]:
        measured = [_UNITS[self._unit] if each == _SPEED else each for each in layout.measured]
        return ["epoch", "step", *map(_title, layout.metrics), *measured, *(["best"] if self._best.name else [])]

    def _cells(self, row: EpochRow, is_best: bool, layout: _Layout) -> list[str]:
        values = [row.metrics.get(name) for name in layout.metrics]
        measured = {_SECONDS: _seconds(row.seconds), _SPEED: f"{row.speed.per_second:.0f}" if row.speed else ""}
        cells = [str(row.epoch), f"{row.step:,}", *map(_number, values), *(measured[each] for each in layout.measured)]
        return [*cells, *([_MARK if is_best else ""] if self._best.name else [])]


def shown_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without the values of single steps of those that have a value of the epoch."""
    return {
        name: value for name, value in values.items() if not (name.endswith("_step") and f"{name[:-5]}_epoch" in values)
    }


def _title(name: str) -> str:
    return name.removesuffix("_epoch")


def _width(title: str) -> int:
    fixed = {"epoch": 5, "step": 7, "s/epoch": 7, "best": 4}
    return fixed.get(title, max(len(title), _LEAST_WIDTH))


def _aligned(cells: list[str], widths: list[int]) -> str:
    return " " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}"
    return text if len(text) <= _LEAST_WIDTH else f"{value:.3g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
