"""Screens of ``ProgressBar``: their protocol, and lines of text for outputs other than terminals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..framework.system.console import print_line
from .epoch_table import EpochTable
from .progress_details import speed

UNKNOWN = float("inf")
"""The total of a stage whose number of batches is not known."""
_SMOOTHING = 0.3
_DAY = 86_400.0
# An end that is estimated from less time would change with each look.
_LEAST_SECONDS = 5.0


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

    def pace(self) -> list[str]:
        """Return the speed, and the remaining time if it is known."""
        left = (self.total - self.done) / self.rate if self.rate and self.total != UNKNOWN else 0.0
        return [speed(self.rate), *([f"{_duration(left)} left"] if left else [])]

    def ended(self, done: int, details: Sequence[str], now: float) -> str:
        """Return the line for the end of the stage, with the average speed of the entire stage."""
        seconds = now - self.began
        self.done = done
        rate = [speed((done - self.first) / seconds)] if seconds > 0 and done > self.first else []
        unit = "batch" if done == 1 else "batches"
        return f"{self.label}: " + ", ".join([f"{done} {unit} in {_duration(seconds)}", *rate, *details])


class Ending:
    """The time of day at which a fit will end, at its speed so far, validations included.

    Args:
        first_step: optimizer steps before this start of the fit.
        last_step: optimizer steps at its end; ``UNKNOWN`` if nothing limits them.
    """

    def __init__(self, first_step: int, last_step: float) -> None:
        self._first_step = first_step
        self._last_step = last_step
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


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
