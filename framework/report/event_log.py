"""``history.jsonl`` in a run's directory: what happened in a fit, one JSON value a line, appended while it trains.

    {"begin": {"time", "step", "attempt", "checkpoint", "pid", "host"}}   a fit begins, or continues from a checkpoint;
                                                                          with "rewind" it has gone back to it itself
    {"step", "time", "values": {name: number}}                            values that were logged at an optimizer step
    {"note", "time"}                                                      a line that phalanx has shown
    {"data": {"step", "epoch", "batch", ...}}                             where in the data a step begins
    {"end": {"time", "step", "exit_code"}}                                the fit has ended by itself
    {"end": {"time", "step", "exit_code", "message"}}                     its launcher has seen why its ranks ended

A file that a killed process has cut off is read up to the cut. Times are in seconds since 1970.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system.failure_records import write_atomically
from .data_marks import DataMark, add_mark, written
from .series import History
from .values import as_number
from .verdicts import headline

HISTORY = "history.jsonl"
"""The name of the file."""
MOST_NOTES = 100
MOST_ATTEMPTS = 1_000
# The file is written again without thinned values when it has so many more values than the series.
_SPARE_VALUES = 20_000


# Exit codes of attempts that ended well, or were told to end and have saved.
_PLANNED = (0, 75)


@dataclass
class Attempt:
    """A fit that began in the run's directory, or continued in it."""

    began: float
    step: int
    """Optimizer steps that it began with."""
    attempt: int = 0
    """The number of restarts of its launch before it."""
    checkpoint: str | None = None
    is_rewind: bool = False
    """Whether the fit before has gone back to the checkpoint itself, without an end of its ranks."""
    pid: int | None = None
    host: str | None = None
    ended: float | None = None
    exit_code: int | None = None
    message: str = ""
    """Why it ended, the first line of what its launcher has printed."""
    seen: float = 0.0
    """The last time at which it wrote anything."""
    reached: int = 0
    """The optimizer step that it is known to have reached."""
    passed: dict[int, float] = field(default_factory=dict)
    """Times at which steps were reached, of the values that are in the file."""

    def look(self, seconds: float, step: int) -> None:
        """Record that the attempt was alive at a time, after this number of steps."""
        self.seen, self.reached = max(self.seen, seconds), max(self.reached, step)
        self.passed.setdefault(step, seconds)


@dataclass
class Events:
    """The content of ``history.jsonl``."""

    history: History = field(default_factory=History)
    attempts: list[Attempt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    marks: list[DataMark] = field(default_factory=list)
    """Positions in the data at which optimizer steps begin, in ascending order."""
    damaged: int = 0
    """Lines that cannot be read."""

    def take(self, event: Any) -> None:
        """Add one line of the file."""
        if not isinstance(event, dict):
            self.damaged += 1
        elif isinstance(begin := event.get("begin"), dict):
            self._begin(begin)
        elif isinstance(values := event.get("values"), dict):
            step, seconds = int(as_number(event.get("step")) or 0), as_number(event.get("time")) or 0.0
            self.history.add(step, seconds, values)
            if self.attempts:
                self.attempts[-1].look(seconds, step + 1)
        elif isinstance(note := event.get("note"), str):
            if note not in self.notes:
                self.notes = [*self.notes, note][-MOST_NOTES:]
        elif isinstance(mark := event.get("data"), dict):
            try:
                add_mark(self.marks, mark)
            except (LookupError, TypeError, ValueError):
                self.damaged += 1
        elif isinstance(end := event.get("end"), dict) and self.attempts:
            self._end(self.attempts[-1], end)

    def _begin(self, begin: dict[str, Any]) -> None:
        seconds, step = as_number(begin.get("time")) or 0.0, int(as_number(begin.get("step")) or 0)
        checkpoint, host = (None if begin.get(name) is None else str(begin[name]) for name in ("checkpoint", "host"))
        pid, attempt = as_number(begin.get("pid")), int(as_number(begin.get("attempt")) or 0)
        rewind = bool(begin.get("rewind"))
        new = Attempt(seconds, step, attempt, checkpoint, rewind, None if pid is None else int(pid), host)
        new.look(seconds, step)
        self.attempts = [*self.attempts, new][-MOST_ATTEMPTS:]
        # The values of a step are written under its index, which is the number of steps before it.
        self.history.cut(step)

    def _end(self, last: Attempt, end: dict[str, Any]) -> None:
        seconds, step, message = as_number(end.get("time")), as_number(end.get("step")), end.get("message")
        if last.exit_code == 0:
            # It has ended well; what failed later was another part of the script.
            return
        last.ended = seconds if last.ended is None else last.ended
        last.exit_code = end.get("exit_code") if last.exit_code is None else last.exit_code
        last.message = message if isinstance(message, str) else last.message
        last.look(seconds or last.seen, last.reached if step is None else int(step))


def read_events(directory: Path) -> Events:
    """Return the events of a run; empty if it has no file, or none that can be read."""
    events = Events()
    for line in whole_lines(directory / HISTORY):
        try:
            events.take(json.loads(line))
        except (ValueError, OverflowError, RecursionError):
            events.damaged += 1
    return events


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are complete; none if it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            # The last line may be in the middle of being written.
            if line.endswith(b"\n"):
                yield line


class EventWriter:
    """Appends to ``history.jsonl``, and writes it again once thinned values take most of it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / HISTORY
        self.events = read_events(directory)
        self._values = self.events.history.count()

    def append(self, events: list[dict[str, Any]]) -> None:
        """Add events. An error of the disk is raised, and the same events may be given again."""
        append_lines(self._path, events)
        for event in events:
            self.events.take(event)
            self._values += len(event.get("values", ()))
        if self._values > 2 * self.events.history.count() + _SPARE_VALUES:
            self._rewrite()

    def _rewrite(self) -> None:
        lines = [json.dumps({"note": note}) for note in self.events.notes]
        lines += [json.dumps({"data": mark}, separators=(",", ":")) for mark in written(self.events.marks)]
        rows = self.events.history.rows()
        row = next(rows, None)
        for index, one in enumerate(self.events.attempts):
            begin = {
                "time": one.began, "step": one.step, "attempt": one.attempt,
                "checkpoint": one.checkpoint, "rewind": one.is_rewind, "pid": one.pid, "host": one.host,
            }  # fmt: skip
            lines.append(json.dumps({"begin": begin}))
            following = self.events.attempts[index + 1].began if index + 1 < len(self.events.attempts) else None
            while row is not None and (following is None or row[1] < following):
                lines.append(json.dumps({"step": row[0], "time": row[1], "values": row[2]}, separators=(",", ":")))
                row = next(rows, None)
            # A later attempt that began at an earlier step removed the values, not the knowledge of the time.
            end = {
                "time": one.ended or one.seen, "step": one.reached, "exit_code": one.exit_code, "message": one.message,
            }  # fmt: skip
            if following is not None:
                lines.append(json.dumps({"end": end}))
        write_atomically(self._path, "\n".join(lines) + "\n")
        self._values = self.events.history.count()


def record_end(directory: Path, step: int | None, exit_code: int, message: str) -> None:
    """Record why a fit has ended whose processes are gone; ``step`` is None if it had not begun to train.

    Raises:
        OSError: it cannot be written.
    """
    end = {"time": time.time(), "step": step, "exit_code": exit_code, "message": headline(message)}
    append_lines(directory / HISTORY, [{"end": end}])


def append_lines(path: Path, events: list[dict[str, Any]]) -> None:
    """Append JSON values to a file, one a line, by one system call.

    Raises:
        OSError: they cannot be written.
    """
    text = "".join(json.dumps(event, separators=(",", ":"), default=str) + "\n" for event in events)
    with open(path, "ab") as file:
        # A process that was killed may have left half a line.
        torn = path.stat().st_size and not _ends_line(path)
        file.write((b"\n" if torn else b"") + text.encode("utf-8", "backslashreplace"))


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def past_failures(directory: Path) -> tuple[int, float]:
    """Return how often a run has failed before the attempt in progress, and the seconds of those attempts."""
    earlier = read_events(directory).attempts[:-1]
    failures = sum(each.exit_code not in _PLANNED for each in earlier)
    return failures, sum(max(0.0, each.seen - each.began) for each in earlier)
