"""``RunRecorder``: keeps ``status.json`` and ``history.jsonl`` of a fit up to date, from a thread of rank 0.

The training thread only appends what is logged to a queue. The recorder's thread looks at the counters of the run once
a second, and writes: a disk that does not answer stops this thread alone, and a step costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from ..system.failure_records import write_atomically
from ..system.processes import start_of
from .event_log import EventWriter
from .series import MEMORY, RATE, THROUGHPUT, rate_name

STATUS = "status.json"
"""The name of the file with the state of a fit in progress."""
SCHEMA = 1
_PERIOD_SECONDS = 1.0
# How long the end of a fit waits for a disk that does not answer.
_CLOSE_SECONDS = 5.0
# Events beyond this many are dropped: the disk does not answer, and the queue would fill the memory.
_CAPACITY = 50_000
# Rows of values that are written at once: a series does not hold more of them for long, and writing takes time from the
# training thread, which shares an interpreter with this one.
_MOST_ROWS = 200


class RunRecorder:
    """Records one fit.

    Args:
        directory: the run's directory.
        look: returns the state of the run in JSON values: at least its ``step``; called from the recorder's thread.
        begin: the content of the event ``begin``, without the process.
    """

    def __init__(self, directory: Path, look: Callable[[], dict[str, Any]], begin: Mapping[str, Any]) -> None:
        self._directory = directory
        self._look = look
        self._events: deque[dict[str, Any]] = deque(maxlen=_CAPACITY)
        self._closing = Event()
        self._process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._began = time.time()
        self._writer: EventWriter | None = None
        self._last: tuple[float, int, float | None] | None = None
        """The time, the optimizer steps and the trained samples or tokens of the last look at which a step was new."""
        self._rate: float | None = None
        self._write_lock = Lock()
        self._final: dict[str, Any] = {}
        self._events.append({"begin": {"time": self._began, **begin, **self._process}})
        # A daemon thread: a disk that never answers must not keep the process from ending.
        self._thread = Thread(target=self._run, name="phalanx-recorder", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int, rates: Sequence[float] = ()) -> None:
        """Record values that were logged at an optimizer step, and the learning rates of its optimizers.

        The values are not copied, and completed in the recorder's thread.
        """
        self._events.append({"step": step, "time": time.time(), "values": values, "rates": rates})

    def mark_data(self, mark: Mapping[str, Any]) -> None:
        """Record where in the data the next step begins; see ``DataMark``."""
        self._events.append({"data": mark})

    def note(self, text: str) -> None:
        """Record a line that was shown."""
        self._events.append({"note": text, "time": round(time.time(), 3)})

    def flush(self) -> None:
        """Write the files now. An error of the disk is ignored: the next call writes it too."""
        with self._write_lock, contextlib.suppress(OSError):
            self._write(self._state())

    def close(self, exit_code: int, message: str | None) -> None:
        """Record the end of the fit, and end the thread."""
        if self._closing.is_set():
            return
        state = self._state()
        end = {"time": time.time(), "step": state.get("step", 0), "exit_code": exit_code}
        self._events.append({"end": end})
        self._final = {**state, "state": "ended", "exit_code": exit_code, "message": message}
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self.flush()
            self._closing.wait(_PERIOD_SECONDS)
        with self._write_lock, contextlib.suppress(OSError):
            self._write(self._final)

    def _state(self) -> dict[str, Any]:
        now = time.time()
        head = {"schema": SCHEMA, "state": "running", "began": self._began, "updated": now}
        process = {**self._process, "process_start": start_of(os.getpid())}
        try:
            state = self._look()
        # The training thread changes what is looked at.
        except Exception:
            state = {}
        return {**head, **process, **state, "steps_per_second": self._rate}

    def _write(self, state: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = EventWriter(self._directory)
        self._measure(state)
        events = [self._events.popleft() for _ in range(len(self._events))]
        try:
            if events:
                self._writer.append([*map(complete, sparse(events))])
        except OSError:
            self._events.extendleft(reversed(events))
            raise
        state["metrics"] = self._writer.events.history.latest()
        write_atomically(self._directory / STATUS, json.dumps(state, default=str) + "\n")

    def _measure(self, state: dict[str, Any]) -> None:
        """Add this second's speed and memory to the series."""
        step, now = state.get("step"), state["updated"]
        if step is None:
            return
        values: dict[str, float] = {}
        if self._last is not None and step == self._last[1]:
            return
        if self._rate is not None and self._last is not None and now - self._last[0] < _PERIOD_SECONDS / 2:
            # The rest of a period at the end of a fit, mostly its last save, does not show its speed.
            return
        throughput = state.get("throughput") or {}
        count, unit = throughput.get("count"), throughput.get("unit")
        if self._last is not None and step > self._last[1] and now > self._last[0]:
            seconds = now - self._last[0]
            self._rate = values[RATE] = round((step - self._last[1]) / seconds, 4)
            state["steps_per_second"] = self._rate
            if count is not None and self._last[2] is not None:
                values[f"{THROUGHPUT} {unit}"] = round((count - self._last[2]) / seconds, 4)
        if step and (used := state.get("memory", {}).get("used")):
            values[MEMORY] = used
        self._last = now, step, count
        if values:
            self._events.append({"step": step - 1, "time": round(now, 3), "values": values})


def complete(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as it is written: values with learning rates, which are NaN where they are not known."""
    if "rates" not in event:
        return event
    rates = {rate_name(number): rate for number, rate in enumerate(event["rates"]) if rate == rate}
    return {"step": event["step"], "time": round(event["time"], 3), "values": {**event["values"], **rates}}


def sparse(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events without most rows of values, if there are many; the last one and changes of names are kept."""
    every = len(events) // _MOST_ROWS
    if every < 2:
        return events
    names = [event["values"].keys() if "values" in event else None for event in events]
    last = len(events) - 1
    return [
        event
        for index, event in enumerate(events)
        if index % every == 0 or index == last or names[index] is None or names[index] != names[index - 1]
    ]
