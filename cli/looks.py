"""Text of the commands that look at runs: colours, lines that fit the terminal, and small curves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..framework.report.loose import text
from ..framework.report.series import as_number
from ..framework.report.times import number_text
from ..framework.system.console import encodable
from ..framework.system.environment import takes_colors
from .output import printable, say

_COLORS = {"green": 32, "red": 31, "yellow": 33, "bold": 1, "faint": 2}
_OF_STATE = {
    "finished": "green", "running": "green", "preempted": "yellow", "interrupted": "yellow", "silent": "yellow",
}  # fmt: skip
_BLOCKS = "▁▂▃▄▅▆▇█"
_UNLIMITED = 10_000
_LEAST_CURVE, _MOST_CURVE = 6, 24
_LEAST_CELL = 8


class Curve(NamedTuple):
    """A cell of a table that is drawn in the columns which the text leaves."""

    values: Sequence[Any]
    beside: Sequence[Any] = ()
    """The values of a curve that is drawn in the same range."""


def painted(shown: str, color: str) -> str:
    """Return text in a colour, where the standard output takes colours. Apply it to text that is ``printable``."""
    return f"\x1b[{_COLORS[color]}m{shown}\x1b[0m" if takes_colors(sys.stdout) else shown


def state_color(state: Any) -> str:
    """Return the colour of a run's state."""
    return _OF_STATE.get(text(state), "red")


def line_width() -> int:
    """Return the columns of the terminal; a pipe takes lines of any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


def shortened(shown: str, width: int) -> str:
    """Return text of at most ``width`` columns, with its end left out if it is longer."""
    return shown if len(shown) <= width else shown[: max(0, width - 3)] + "..." if width > 3 else shown[:width]


def say_fitted(shown: str, color: str | None = None) -> None:
    """Print one line that does not wrap."""
    plain = encodable(shortened(printable(shown), line_width()), sys.stdout)
    print(plain if color is None else painted(plain, color))


def say_wrapped(shown: str, indent: str = " ") -> None:
    """Print a paragraph, wrapped at the terminal's width."""
    width, line = line_width() - 1, indent
    for word in printable(shown).split(" "):
        if len(line) > len(indent) and len(line) + 1 + len(word) > width:
            say(line)
            line = indent
        line += ("" if line == indent else " ") + word
    say(line)


def fitted_table(
    head: Sequence[str], lines: Sequence[Sequence[str | Curve]], last_color: Sequence[str] = (), yielding: int = -1
) -> None:
    """Print rows under a header. Where the terminal is too narrow, curves are shortened first, then one column.

    Args:
        last_color: the colour of the second column of each row.
        yielding: the column that is shortened: by default the last one.
    """
    total = line_width()
    cells = _drawn((head, *lines), total)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - total
    widths[yielding] -= max(0, min(excess, widths[yielding] - _LEAST_CELL))
    for number, line in enumerate(cells):
        shown = [shortened(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)]
        whole = shortened("  ".join(shown).rstrip(), total)
        if number and last_color and len(whole) > widths[0] + 2 + widths[1]:
            start, end = widths[0] + 2, widths[0] + 2 + widths[1]
            whole = whole[:start] + painted(whole[start:end], last_color[number - 1]) + whole[end:]
        elif not number:
            whole = painted(whole, "faint")
        print(whole)


def _drawn(rows: Sequence[Sequence[str | Curve]], total: int) -> list[list[str]]:
    """Return the cells as text; columns of curves are left out where they have no room or no curve can be drawn."""
    columns = list(zip(*rows, strict=True))
    of_curves = [any(isinstance(cell, Curve) for cell in column) for column in columns]
    texts = [column for column, is_curve in zip(columns, of_curves, strict=True) if not is_curve]
    left = total - sum(2 + max(len(printable(str(cell))) for cell in column) for column in texts) + 2
    width = left // sum(of_curves) - 2 if any(of_curves) else 0
    width = min(width, _MOST_CURVE) if width >= _LEAST_CURVE else 0
    drawn = [
        [spark(cell.values, width, cell.beside) if isinstance(cell, Curve) else printable(cell) for cell in column]
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
