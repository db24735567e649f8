"""Screens of ``ProgressBar``: lines of text, a live bar in a terminal, and HTML in a notebook."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, cast

from ..framework.system.console import EncodableStream, print_line
from .epoch_table import Best, EpochTable

UNKNOWN = float("inf")
"""The total of a stage whose number of batches is not known."""
_SMOOTHING = 0.3
_DAY = 86_400.0
# An end that is estimated from less time would change with each look.
_LEAST_SECONDS = 5.0
_DEBUGGERS = ("bdb", "cmd", "pdb", "IPython.core.debugger")
"""The modules that write for a debugger of the terminal."""
_LEAST_BAR, _MOST_BAR = 8, 24
_MOST_LINES = 3
_NOTEBOOK_SECONDS = 0.25
_MOST_ROWS = 50
"""The last rows of a notebook's table, which each update sends. All rows are sent once, at the end of the stage."""


@dataclass
class Frame:
    """Progress of one stage: a training epoch, or an evaluation within it."""

    label: str
    total: float
    """Batches of the stage; ``UNKNOWN`` if their number is not known."""
    began: float
    """The time of its start, as ``time.monotonic`` gives it."""
    counted: int
    """Batches that ``count_batch`` has counted; those that a resumed epoch skips at first."""
    looked: float
    """The time of the last ``look``."""
    done: int
    """Batches done at that time."""
    rate: float = 0.0
    """Batches in a second, recently."""

    def __post_init__(self) -> None:
        # The average speed is that of the batches after the first ones, since this time.
        self._first, self._measured_from = self.counted, self.began

    def count_batch(self) -> int:
        """Count a batch; return the number of batches counted."""
        self.counted += 1
        return self.counted

    def look(self, done: int, now: float) -> None:
        """Update the speed with the batches since the previous call."""
        if now > self.looked and done > self.done:
            rate = (done - self.done) / (now - self.looked)
            self.rate = rate if not self.rate else _SMOOTHING * rate + (1 - _SMOOTHING) * self.rate
        self.looked, self.done = now, done

    def restart_clock(self, done: int, now: float) -> None:
        """Measure the speed from now on, where these batches are done."""
        self._measured_from = self.looked = now
        self._first = self.done = done

    def shift(self, seconds: float) -> None:
        """Exclude an interruption of this duration from the speed."""
        self.began += seconds
        self.looked += seconds
        self._measured_from += seconds

    def position(self) -> str:
        """Return the number of batches done, and their total if it is known."""
        return f"{self.done}/{self.total:.0f}" if self.total != UNKNOWN else str(self.done)

    def pace(self) -> list[str]:
        """Return the speed, and the remaining time if it is known."""
        left = (self.total - self.done) / self.rate if self.rate and self.total != UNKNOWN else 0.0
        return [_speed(self.rate), *([f"{_duration(left)} left"] if left else [])]

    def ended(self, done: int, details: Sequence[str], now: float) -> str:
        """Return the line for the end of the stage, with the average speed of the entire stage."""
        self.done = done
        measured = now - self._measured_from
        rate = [_speed((done - self._first) / measured)] if measured > 0 and done > self._first else []
        unit = "batch" if done == 1 else "batches"
        parts = [f"{done} {unit} in {_duration(now - self.began)}", *rate, *details]
        return f"{self.label}: {', '.join(parts)}"


class Ending:
    """The time of day at which a fit will end, at its speed so far, validations included.

    Args:
        first_step: optimizer steps before this start of the fit.
        last_step: optimizer steps at its end; ``UNKNOWN`` if nothing limits them.
    """

    def __init__(self, first_step: int, last_step: float) -> None:
        self._last_step = last_step
        self.restart_clock(first_step)

    def restart_clock(self, step: int) -> None:
        """Measure the speed from this optimizer step on."""
        self._first_step = step
        self._began = time.monotonic()

    def text(self, step: int) -> list[str]:
        """Return ``["ends 14:10"]``, with the date if that is more than a day ahead; nothing while it is unknown."""
        seconds = time.monotonic() - self._began
        if step <= self._first_step or self._last_step == UNKNOWN or seconds < _LEAST_SECONDS:
            return []
        left = seconds / (step - self._first_step) * (self._last_step - step)
        form = "%H:%M" if left < _DAY else "%b %d %H:%M"
        return [f"ends {time.strftime(form, time.localtime(time.time() + left))}"]


class Screen(Protocol):
    """Output of progress, and the time between two updates."""

    seconds: float

    def show(self, text: str) -> None:
        """Print a line of text."""

    def draw(self, frame: Frame, details: Sequence[str]) -> None:
        """Show the progress of a stage, with further numbers of it."""

    def pause(self, frame: Frame) -> float:
        """Return the seconds until the next update."""

    def end(self, line: str) -> None:
        """Print the line for the end of an evaluation, unless it is empty."""

    def end_epoch(self, line: str, table: EpochTable) -> None:
        """Show the end of a training epoch: a line about it, or the last row of the table of epochs."""

    def close(self) -> None:
        """Remove the live bar, if there is one."""


class Lines:
    """Lines of text: about ten in an epoch, at least ten seconds apart, and at least one per minute."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def show(self, text: str) -> None:
        print_line(text)

    def draw(self, frame: Frame, details: Sequence[str]) -> None:
        self.show(f"{frame.label}: " + ", ".join([f"{frame.position()} batches", *frame.pace(), *details]))

    def pause(self, frame: Frame) -> float:
        tenth = frame.total / frame.rate / 10 if frame.rate else 0.0
        return min(max(self.seconds, tenth), 6 * self.seconds)

    def end(self, line: str) -> None:
        if line:
            self.show(line)

    def end_epoch(self, line: str, table: EpochTable) -> None:
        self.show(line)

    def close(self) -> None:
        pass


class Output:
    """The standard output beside a live bar: a debugger that writes to it removes the bar, and has the terminal."""

    def __init__(self, beside: Any, alone: Any, close: Callable[[], None]) -> None:
        """``beside`` writes above the bar, ``alone`` to the terminal. ``close`` removes the bar."""
        self._beside = beside
        self._alone = alone
        self._close = close

    def write(self, text: str) -> int:
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


class Notebook:
    """One output of a cell, which is replaced: the bar of the stage in progress below the table of its epochs.

    The bar is gone once the stage has ended, and the table remains. Front ends without HTML show text.
    """

    def __init__(self) -> None:
        # A notebook has imported it already.
        from IPython.display import display

        self.seconds = _NOTEBOOK_SECONDS
        self._display: Any = display
        self._identity = uuid.uuid4().hex
        self._is_shown = False
        self._table = EpochTable(Best())
        self._bar = self._line = ""

    def show(self, text: str) -> None:
        print_line(text)

    def draw(self, frame: Frame, details: Sequence[str]) -> None:
        numbers = ", ".join([frame.position(), *frame.pace(), *details])
        extent = "" if frame.total == UNKNOWN else f' max="{max(1.0, frame.total):g}" value="{frame.done}"'
        self._line = f"{frame.label}: {numbers}"
        self._bar = f"<div>{escape(frame.label)} <progress{extent}></progress> {escape(numbers)}</div>"
        self._update()

    def pause(self, frame: Frame) -> float:
        return self.seconds

    def end(self, line: str) -> None:
        self._bar = ""
        if line:
            self.show(line)

    def end_epoch(self, line: str, table: EpochTable) -> None:
        self._table, self._line, self._bar = table, line, ""
        self._update()

    def close(self) -> None:
        if self._bar or self._is_shown:
            self._bar = ""
            self._update(most=None)
        self._is_shown = False
        self._identity = uuid.uuid4().hex

    def _update(self, most: int | None = _MOST_ROWS) -> None:
        data = {"text/html": self._table.html(most) + self._bar, "text/plain": self._line}
        self._display(data, raw=True, display_id=self._identity, update=self._is_shown)
        self._is_shown = True


def _speed(rate: float) -> str:
    """Return a number of batches in a second."""
    return f"{rate:,.0f} it/s" if rate >= 999.5 else f"{rate:.3g} it/s"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
