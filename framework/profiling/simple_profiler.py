"""``SimpleProfiler``: the seconds of each section of a fit, and its share of all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .profiler import SECTIONS, Profiler

_HEAD = ("Section", "Calls", "Seconds", "Share")


@dataclass
class Section:
    """The calls of a section."""

    calls: int = 0
    seconds: float = 0.0
    """In the section, without the time in sections inside of it."""


class SimpleProfiler(Profiler):
    """Measure the sections of a fit with the clock of the host, and print a table at its end.

    The seconds of a section do not contain those of sections inside of it, so the shares add up to the entire fit;
    ``(other)`` is the rest. On a GPU, the host only queues operations: a section takes as long as queueing them, and
    the wait for the device appears where the host reads from it. The section ``callbacks`` includes the hooks of the
    module.

    Args:
        dirpath: The directory of the files; by default ``profile`` in the directory of the run.
        filename: The first part of the names of the files; by default ``fit``.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        super().__init__(dirpath, filename)
        self.sections: dict[str, Section] = {}
        """The sections of the current or last fit, by name."""
        self.total_seconds = 0.0
        self._began: float | None = None
        # The sections in progress, and the time at which the last of them began or was continued.
        self._open: list[str] = []
        self._since = 0.0

    def begin(self, directory: Path | None, rank: int) -> None:
        super().begin(directory, rank)
        self.sections, self._open = {}, []
        self._began = self._since = time.perf_counter()

    def start(self, action_name: str) -> None:
        now = time.perf_counter()
        if self._open:
            self.sections[self._open[-1]].seconds += now - self._since
        self.sections.setdefault(action_name, Section()).calls += 1
        self._open.append(action_name)
        self._since = now

    def stop(self, action_name: str) -> None:
        now = time.perf_counter()
        if action_name not in self._open:
            return
        # An error may have left sections inside of this one open.
        while (name := self._open.pop()) != action_name:
            self.sections[name].seconds += now - self._since
            self._since = now
        self.sections[name].seconds += now - self._since
        self._since = now

    def end(self) -> None:
        if self._began is not None:
            self.total_seconds = time.perf_counter() - self._began
        super().end()

    def shares(self) -> dict[str, float]:
        """Return the share of each section in the last fit; together with ``(other)`` they add up to 1."""
        total = max(self.total_seconds, 1e-12)
        found = {name: section.seconds / total for name, section in self.sections.items()}
        return {**found, "(other)": max(0.0, 1.0 - sum(found.values()))}

    def summary(self) -> str:
        """Return a table of the sections, those of a fit first."""
        names = [*(name for name in SECTIONS if name in self.sections), *(self.sections.keys() - set(SECTIONS))]
        rows = [(name, str(self.sections[name].calls), self.sections[name].seconds) for name in names]
        other = self.total_seconds - sum(seconds for _, _, seconds in rows)
        rows += [("(other)", "", max(0.0, other)), ("all", "", self.total_seconds)]
        total = max(self.total_seconds, 1e-12)
        cells = [_HEAD, *((name, calls, f"{part:.3f}", f"{100 * part / total:.1f} %") for name, calls, part in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
        lines = []
        for name, *numbers in cells:
            aligned = [f"  {number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
            lines.append(f"{name:<{widths[0]}}" + "".join(aligned))
        return "\n".join(lines)
