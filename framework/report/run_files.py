"""``RunFiles``: the files in a run's directory, read as far as they can be, and the state of the run behind them."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import INTERRUPTED, Preempted, StalledError
from ..storage.cached_url import local_place
from ..system.processes import start_of
from ..system.run_directory import CONFIG, RANKS, REPORT, identity_of
from .evaluations import Evaluation, add_to_history, current, evaluations_of
from .event_log import HISTORY, Events, read_events
from .recorder import STATUS
from .values import as_number, parsed_time, timestamp

PAGE = "report.html"
"""The name of the report's page."""
PRUNED = "pruned"
"""The first word of the reason for which the pruner of a sweep stops a run, and the state of such a run."""
# A process of another host that wrote nothing for so long is not counted as running.
SILENT_SECONDS = 60.0
_MARKS = (STATUS, HISTORY, "run.id")
_STATES = {
    0: "finished",
    Preempted.exit_code: "preempted",
    StalledError.exit_code: "stalled",
    INTERRUPTED: "interrupted",
}
STATES = ("running", "silent", PRUNED, *_STATES.values(), "failed", "killed", "unknown")
"""All states of a run."""
_VERDICTS = {
    "finished": "good", "running": "good", "pruned": "good",
    "preempted": "warn", "interrupted": "warn", "silent": "warn",
}  # fmt: skip


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run."""
    if any((directory / name).is_file() for name in _MARKS):
        return True
    return any(_is_own(directory / name) for name in (CONFIG, REPORT))


def ended_state(exit_code: int) -> str:
    """Return the state of a run whose fit has ended with an exit code."""
    return _STATES.get(exit_code, "failed")


def verdict_of(state: str) -> str:
    """Return ``"good"``, ``"warn"`` or ``"bad"`` for a state of a run, by which it is coloured."""
    return _VERDICTS.get(state, "bad")


def _is_own(document: Path) -> bool:
    """Whether a document of a common name was written by a run: models have a ``config.json`` too."""
    try:
        return b'"phalanx"' in document.read_bytes()
    except OSError:
        return False


@dataclass
class RunFiles:
    """The content of the files of one run. Each is read at most once; a damaged one counts as empty."""

    directory: Path
    ended: dict[str, Any] | None = None
    """The end of the fit, where it is not yet in ``report.json``."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that is damaged."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the run at its start."""
        return self._read(CONFIG)

    @cached_property
    def report(self) -> dict[str, Any]:
        """The report of the last fit that has ended."""
        return self._read(REPORT)

    @cached_property
    def status(self) -> dict[str, Any]:
        """The state that the last fit has written while it trained."""
        return self._read(STATUS)

    @cached_property
    def ranks(self) -> dict[str, Any]:
        """The state of each rank, as their supervisor has written it."""
        return self._read(RANKS)

    @cached_property
    def events(self) -> Events:
        """The history of the run."""
        events = read_events(self.directory)
        if events.damaged:
            self.problems.append(f"{HISTORY} has {events.damaged} lines that cannot be read.")
        add_to_history(events.history, current(self.evaluations, events))
        return events

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the run's checkpoints by other processes, in their order."""
        return evaluations_of(self.directory)

    @cached_property
    def identity(self) -> str | None:
        """The id that the run's checkpoints record."""
        return identity_of(self.directory)

    @property
    def checkpoint_directories(self) -> list[Path]:
        """The directories that the run saves checkpoints into."""
        given = self.config.get("checkpoint_directories")
        own = self.directory / "checkpoints"
        others = given if isinstance(given, list) else []
        return [Path(os.path.abspath(local_place(path))) for path in (own, *others) if isinstance(path, (str, Path))]

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """The report, unless a fit has begun in this directory since; then an empty dict."""
        if self.ended is not None:
            return self.ended
        ended, began = parsed_time(self.report.get("ended")), as_number(self.status.get("began"))
        if ended is None or began is None:
            # A supervisor may have written the report, without a time.
            return self.report
        # Both times are those of rank 0's clock. That of the report is cut to a millisecond.
        return self.report if ended >= (parsed_time(timestamp(began)) or began) else {}

    @cached_property
    def state(self) -> str:
        """One of ``STATES``."""
        code = self.outcome.get("exit_code")
        if code is None and self.status.get("state") == "ended":
            code = self.status.get("exit_code")
        if isinstance(code, int):
            is_pruned = code == 0 and str(self.outcome.get("stopped") or "").startswith(f"{PRUNED}:")
            return PRUNED if is_pruned else ended_state(code)
        if not self.status:
            return "unknown"
        if self._runs_here() is False:
            return "killed"
        return "running" if self.age < SILENT_SECONDS else "silent"

    @property
    def age(self) -> float:
        """Seconds since the last sign of life of a fit in progress."""
        return max(0.0, time.time() - (as_number(self.status.get("updated")) or 0.0))

    def _runs_here(self) -> bool | None:
        """Whether the process of rank 0 is still there; None if it is on another host, or the system cannot tell."""
        pid, start = self.status.get("pid"), self.status.get("process_start")
        if self.status.get("host") != socket.gethostname() or not isinstance(pid, int) or sys.platform != "linux":
            return None
        return None if start is None else start_of(pid) == start

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.directory / name).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read ({error.__class__.__name__}).")
            return {}
        if not isinstance(found, dict):
            self.problems.append(f"{name} is damaged: it is not a JSON object.")
            return {}
        return found
