"""What commands print: lines, paragraphs and tables that fit the terminal, and JSON for programs.

Control characters are escaped in all text, as names in files of runs and checkpoints may contain any.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ..framework.report.run_files import verdict_of
from ..framework.report.values import as_number, number_text, text
from ..framework.system.console import encodable, folded, printable, terminal_columns
from ..framework.system.environment import takes_colors

_COLORS = {"green": 32, "red": 31, "yellow": 33, "bold": 1, "faint": 2}
_VERDICT_COLORS = {"good": "green", "warn": "yellow", "bad": "red"}
_BLOCKS = "▁▂▃▄▅▆▇█"
# A pipe or a file takes lines of any length.
_UNLIMITED = 10_000
_LEAST_CURVE, _MOST_CURVE = 6, 24
_LEAST_CELL = 8


class Curve(NamedTuple):
    """A cell of a table that is drawn in the columns which the text leaves."""

    values: Sequence[Any]
    beside: Sequence[Any] = ()
    """The values of a curve that is drawn in the same range."""


def say(shown: str = "") -> None:
    """Print one line in full."""
    print(_plain(shown))


def say_json(value: Any) -> None:
    """Print a value as JSON: ASCII, so no character in it acts on a terminal."""
    print(json.dumps(value, indent=2, default=_as_json))


def _as_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _plain(shown: str) -> str:
    return encodable(printable(shown), sys.stdout)


# ---- lines ----------------------------------------------------------------------------------------------------------


def painted(shown: str, color: str) -> str:
    """Return text in a colour, where the standard output takes colours. Apply it to text that is ``printable``."""
    return f"\x1b[{_COLORS[color]}m{shown}\x1b[0m" if takes_colors(sys.stdout) else shown


def state_color(state: Any) -> str:
    """Return the colour of a run's state."""
    return _VERDICT_COLORS[verdict_of(text(state))]


def line_width() -> int:
    """Return the columns of the terminal; a large number for a pipe."""
    return terminal_columns() or _UNLIMITED


def shortened(shown: str, width: int) -> str:
    """Return text of at most ``width`` columns, with its end left out if it is longer."""
    if len(shown) <= width:
        return shown
    return f"{shown[: width - 3]}..." if width > 3 else shown[:width]


def say_fitted(shown: str, color: str | None = None, columns: slice = slice(None)) -> None:
    """Print one line that does not wrap, in a colour: all of it, or some of its columns."""
    line = shortened(_plain(shown), line_width())
    print(line if color is None else _painted_part(line, color, columns))


def say_wrapped(shown: str, indent: str = " ") -> None:
    """Print a paragraph, wrapped at the terminal's width."""
    for line in folded(indent + printable(shown), line_width() - 1, indent, breaks_words=False):
        say(line)


def _painted_part(line: str, color: str, columns: slice) -> str:
    start, stop, _ = columns.indices(len(line))
    return line[:start] + painted(line[start:stop], color) + line[stop:] if start < stop else line


# ---- tables ---------------------------------------------------------------------------------------------------------


def fitted_table(
    head: Sequence[str],
    lines: Sequence[Sequence[str | Curve]],
    second_colors: Sequence[str] = (),
    shortened_column: int = -1,
) -> None:
    """Print rows under a header. Where the terminal is too narrow, curves are shortened first, then one column.

    Args:
        second_colors: the colour of the second column of each row.
        shortened_column: the column that is shortened: by default the last one.
    """
    total = line_width()
    cells = _drawn((head, *lines), total)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - total
    widths[shortened_column] -= max(0, min(excess, widths[shortened_column] - _LEAST_CELL))
    second = slice(widths[0] + 2, widths[0] + 2 + widths[1])
    colors = [("faint", slice(None)), *((color, second) for color in second_colors)]
    for number, line in enumerate(cells):
        shown = [shortened(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)]
        whole = shortened("  ".join(shown).rstrip(), total)
        print(_painted_part(whole, *colors[number]) if number < len(colors) else whole)


def _drawn(rows: Sequence[Sequence[str | Curve]], total: int) -> list[list[str]]:
    """Return the cells as text; columns of curves are left out where they have no room or no curve can be drawn."""
    columns = list(zip(*rows, strict=True))
    of_curves = [any(isinstance(cell, Curve) for cell in column) for column in columns]
    texts = [column for column, is_curve in zip(columns, of_curves, strict=True) if not is_curve]
    left = total - sum(2 + max(len(_plain(str(cell))) for cell in column) for column in texts) + 2
    width = left // sum(of_curves) - 2 if any(of_curves) else 0
    width = min(width, _MOST_CURVE) if width >= _LEAST_CURVE else 0
    drawn = [
        [spark(cell.values, width, cell.beside) if isinstance(cell, Curve) else _plain(cell) for cell in column]
        for column in columns
    ]
    kept = [column for column, is_curve in zip(drawn, of_curves, strict=True) if not is_curve or any(column)]
    return [list(row) for row in zip(*kept, strict=True)]


def spark(values: Sequence[Any], width: int = _MOST_CURVE, beside: Sequence[Any] = ()) -> str:
    """Return a curve as a line of blocks; empty where the output has no such characters.

    Args:
        beside: the values of another curve, drawn as wide and in the same range.
    """
    numbers, others = _averaged(values, width), _averaged(beside, width)
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    if len(numbers) < 2 or width < 1 or not encoding.startswith("utf"):
        return ""
    low, high = min(*numbers, *others), max(*numbers, *others)
    span = high - low or 1.0
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / span))] for value in numbers)


def _averaged(values: Sequence[Any], width: int) -> list[float]:
    """Return the numbers among values, as averages of parts if there are more than ``width``."""
    numbers = [number for value in values if (number := as_number(value)) is not None]
    if len(numbers) <= width or width < 1:
        return numbers
    edges = [round(number * len(numbers) / width) for number in range(width + 1)]
    return [sum(numbers[a:b]) / (b - a) for a, b in pairwise(edges)]


def shown_number(value: Any) -> str:
    """Return a number of a document as text; ``-`` for what is not one."""
    return number_text(as_number(value))
