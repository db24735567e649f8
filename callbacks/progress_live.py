"""``Live``: the screen of ``ProgressBar`` for terminals, a live bar that rich draws above a table of epochs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any, cast

from ..framework.system.console import EncodableStream
from .epoch_table import EpochTable
from .progress_screens import UNKNOWN, Frame

_DEBUGGERS = ("bdb", "cmd", "pdb", "IPython.core.debugger")
"""The modules that write for a debugger of the terminal."""
_LEAST_BAR, _MOST_BAR = 8, 24
_MOST_LINES = 3


class Output:
    """The standard output beside a live bar: a debugger that writes to it removes the bar, and has the terminal."""

    def __init__(self, beside: Any, alone: Any, close: Callable[[], None]) -> None:
        """``beside`` writes above the bar, ``alone`` to the terminal. ``close`` removes the bar."""
        self._beside = beside
        self._alone = alone
        self._close = close

    def write(self, text: str) -> int:
        """Write a text."""
        written: int
        if sys._getframe(1).f_globals.get("__name__") in _DEBUGGERS:
            self._close()
            written = self._alone.write(text)
        else:
            written = self._beside.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beside, name)


def has_stepping_debugger() -> bool:
    """Whether pdb, or a debugger derived from it, follows this thread line by line."""
    debugger = sys.modules.get("bdb")
    return debugger is not None and isinstance(getattr(sys.gettrace(), "__self__", None), debugger.Bdb)


class Live:
    """A live bar of rich, with the numbers of ``ProgressBar`` beside and below it. Nothing is wrapped.

    It is refreshed explicitly, without rich's refresh thread, and removed when a debugger writes to the terminal; it is
    drawn again once the debugger lets the program run.
    """

    def __init__(self, seconds: float, force: bool = False, console_arguments: dict[str, Any] | None = None) -> None:
        # Importing rich takes tens of milliseconds, so it is imported only if a live bar is displayed.
        from rich.console import Console, Group
        from rich.live import Live as Display
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        self.seconds = seconds
        standard = {"file": cast(Any, EncodableStream()), "force_terminal": True if force else None}
        self._console = Console(**{**standard, **(console_arguments or {})})
        self._display_class, self._group, self._bar, self._grid, self._text = Display, Group, Bar, Table.grid, Text
        self._display: Any = None
        self._output = ExitStack()

    def show(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def draw(self, frame: Frame, details: Sequence[str]) -> None:
        if has_stepping_debugger():
            self.close()
            return
        if self._display is None:
            before = sys.stdout
            self._display = self._display_class(console=self._console, auto_refresh=False, transient=True)
            self._display.start()
            if sys.stdout is not before:  # Rich puts its own stream in place where it draws.
                self._output.enter_context(redirect_stdout(cast(Any, Output(sys.stdout, before, self.close))))
        self._display.update(self._drawn(frame, details), refresh=True)

    def _drawn(self, frame: Frame, details: Sequence[str]) -> Any:
        """Return the bar and the lines of numbers, none wider than the terminal."""
        # Some terminals start a new line once their last column is written.
        columns = self._console.width - 1
        width = min(max(columns // 5, _LEAST_BAR), _MOST_BAR)
        first, *more = packed(
            [frame.position(), *frame.pace(), *details], columns - len(frame.label) - width - 2, columns - 1
        )
        total = None if frame.total == UNKNOWN else max(1.0, frame.total)
        grid = self._grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        bar = self._bar(total=total, completed=frame.done, width=width, pulse=total is None)
        grid.add_row(self._text(frame.label), bar, self._text(first))
        return self._group(grid, *(self._text(f" {line}", no_wrap=True, overflow="ellipsis") for line in more))

    def pause(self, frame: Frame) -> float:
        return self.seconds

    def end(self, line: str) -> None:
        while len(line) > self._console.width and ", " in line:
            # The last numbers are left out where they do not fit.
            line = line.rpartition(", ")[0]
        if line:
            self.show(line)

    def end_epoch(self, line: str, table: EpochTable) -> None:
        *header, row = table.lines(self._console.width)
        for each in header:
            self._console.print(self._text(each, style="bold"), soft_wrap=True)
        self._console.print(self._text(row, style="green" if row.endswith("*") else ""), soft_wrap=True)

    def close(self) -> None:
        if self._display is not None:
            self._output.close()
            self._display.stop()
            self._display = None


def packed(parts: Sequence[str], first: int, following: int) -> list[str]:
    """Return parts as at most three lines, joined by commas.

    Args:
        parts: the parts in the order of their importance: those for which there is no room are left out.
        first: columns for the first line.
        following: columns for each of the other lines.
    """
    lines, room = [""], first
    for part in parts:
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) <= room:
            lines[-1] = joined
        elif len(lines) < _MOST_LINES:
            lines.append(part)
            room = following
    return lines
