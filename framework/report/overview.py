"""A run in one line: what a list of many runs reads, without the curves of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..system.run_directory import REPORT
from .document import finite
from .evaluations import latest
from .run_files import RunFiles
from .series import is_logged
from .values import as_number, mapping, parsed_time, text, timestamp, whole

# The outcome is at the beginning of a report, one line for each key; the curves follow.
_HEAD_BYTES = 64 << 10
_LINE = re.compile(r'^  "(\w+)": (.*?),?$')


class RunHead(RunFiles):
    """The files of a run, with the beginning of its report in place of all of it."""

    def _read(self, name: str) -> dict[str, Any]:
        return (self._head() if name == REPORT else None) or super()._read(name)

    def _head(self) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        try:
            with open(self.directory / REPORT, "rb") as file:
                beginning = file.read(_HEAD_BYTES).decode("utf-8", "replace")
            for line in beginning.splitlines():
                if match := _LINE.match(line):
                    found[match[1]] = json.loads(match[2])
        except (OSError, ValueError):
            pass
        # A report of another layout is read in full.
        return found if {"exit_code", "ended", "optimizer_steps"} <= found.keys() else None


def overview(directory: Path) -> dict[str, Any]:
    """Return the state, the length and the results of a run, as JSON values."""
    files = RunHead(directory)
    end, status = files.outcome, files.status
    began = parsed_time(end.get("began")) or as_number(status.get("began"))
    seconds = as_number(end.get("duration_seconds"))
    updated = as_number(status.get("updated"))
    if seconds is None and began is not None and updated is not None:
        seconds = max(0.0, updated - began)
    metrics = mapping(end.get("metrics")) or mapping(status.get("metrics"))
    metrics = {**metrics, **latest(files.evaluations)}
    resolved = mapping(files.config.get("resolved"))
    found: dict[str, Any] = finite({
        "path": str(directory),
        "state": files.state,
        "exit_code": end.get("exit_code", status.get("exit_code")),
        "step": whole(end.get("optimizer_steps")) if end else whole(status.get("step")),
        "epochs": whole(end.get("epochs")) if end else whole(status.get("epoch")),
        "best_score": mapping(end.get("best_score")) or None,
        "metrics": {
            name: number
            for name, value in metrics.items()
            if (number := as_number(value)) is not None and is_logged(name)
        },
        "strategy": text(resolved.get("strategy")) or None,
        "world_size": whole(resolved.get("world_size")),
        "began": None if began is None else timestamp(began),
        "duration_seconds": seconds,
        "total_seconds": as_number(end.get("total_seconds")) or seconds,
        "stopped": end.get("stopped", status.get("message")),
        "problems": files.problems,
    })  # fmt: skip
    return found
