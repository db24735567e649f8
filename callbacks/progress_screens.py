"""Screens of ``ProgressBar``: lines of text, or a live bar that rich draws."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..framework.system.console import EncodableStream, print_line

UNKNOWN = float("inf")
"""The total of a stage whose number of batches is not known."""
_SMOOTHING = 0.3
_DEBUGGERS = ("bdb", "cmd", "pdb", "IPython.core.debugger")
"""The modules that write for a debugger of the terminal."""


@dataclass
class Frame:
    """Progress of one stage: a training epoch, or an evaluation within it."""

    label: str
    total: float
    began: float
    counted: int
    looked: float
    done: int
    first: int = 0
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.first = self.counted

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

    def shift(self, seconds: float) -> None:
        """Exclude an interruption of this duration from the speed."""
        self.began += seconds
        self.looked += seconds

    def position(self) -> str:
        """Return the number of batches done, and their total if it is known."""
        return f"{self.done}/{self.total:.0f}" if self.total != UNKNOWN else str(self.done)

    def pace(self) -> str:
        """Return the speed, and the remaining time if it is known."""
        left = (self.total - self.done) / self.rate if self.rate and self.total != UNKNOWN else 0.0
        return f"{self.rate:.3g} it/s" + (f", {_duration(left)} left" if left else "")

    def ended(self, done: int, metrics_text: str, now: float) -> str:
        """Return the line for the end of the stage, with the average speed of the entire stage."""
        seconds = now - self.began
        self.done = done
        rate = f", {(done - self.first) / seconds:.3g} it/s" if seconds > 0 and done > self.first else ""
        unit = "batch" if done == 1 else "batches"
        return f"{self.label}: {done} {unit} in {_duration(seconds)}{rate}{metrics_text}"


class Screen(Protocol):
    """Output of progress, and the time between two updates."""

    seconds: float

    def show(self, text: str) -> None:
        """Print a line of text."""

    def draw(self, frame: Frame, metrics_text: str) -> None:
        """Show the progress of a stage."""

    def pause(self, frame: Frame) -> float:
        """Return the seconds until the next update."""

    def end(self, line: str) -> None:
        """Print the line for the end of a stage, unless it is empty."""

    def close(self) -> None:
        """Remove the live bar, if there is one."""


class Lines:
    """Lines of text: about ten in an epoch, at least ten seconds apart, and at least one per minute."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def show(self, text: str) -> None:
        print_line(text)

    def draw(self, frame: Frame, metrics_text: str) -> None:
        self.show(f"{frame.label}: {frame.position()} batches, {frame.pace()}{metrics_text}")

    def pause(self, frame: Frame) -> float:
        tenth = frame.total / frame.rate / 10 if frame.rate else 0.0
        return min(max(self.seconds, tenth), 6 * self.seconds)

    def end(self, line: str) -> None:
        if line:
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
    """A live bar of rich. It is refreshed explicitly, without rich's refresh thread.

    The bar is removed when a debugger writes to the terminal, and drawn again once the debugger lets the program run.
    """

    def __init__(self, seconds: float, force: bool = False, console_arguments: dict[str, Any] | None = None) -> None:
        # Importing rich takes tens of milliseconds, so it is imported only if a live bar is displayed.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.seconds = seconds
        standard = {"file": cast(Any, EncodableStream()), "force_terminal": True if force else None}
        self._console = Console(**{**standard, **(console_arguments or {})})
        self._columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        self._text = TextColumn("{task.fields[text]}", markup=False)
        self._progress_class = Progress
        self._bar: Any = None
        self._output = ExitStack()
        self._task: Any = None

    def show(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def draw(self, frame: Frame, metrics_text: str) -> None:
        if has_stepping_debugger():
            self.close()
            return
        if self._bar is None:
            before = sys.stdout
            self._bar = self._progress_class(
                *self._columns, self._text, console=self._console, auto_refresh=False, transient=True
            )
            self._bar.start()
            if sys.stdout is not before:  # Rich puts its own stream in place where it draws.
                self._output.enter_context(redirect_stdout(cast(Any, Output(sys.stdout, before, self.close))))
            self._task = self._bar.add_task("", text="")
        self._bar.update(
            self._task,
            description=frame.label,
            total=None if frame.total == UNKNOWN else frame.total,
            completed=frame.done,
            text=f"{frame.position()} {frame.pace()}{metrics_text}",
        )
        self._bar.refresh()

    def pause(self, frame: Frame) -> float:
        return self.seconds

    def end(self, line: str) -> None:
        if line:
            self.show(line)

    def close(self) -> None:
        if self._bar is not None:
            self._output.close()
            self._bar.stop()
            self._bar = None


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
