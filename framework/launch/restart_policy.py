"""``Restarts``: whether ranks that failed are started again, and what one attempt leaves for the next.

What a fit of an attempt leaves is where it writes. The ranks of the next attempt run the script from its start, and
their n-th fit goes on in the directory of the n-th fit before: never in that of an older run of the same name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.errors import CheckpointError, ConfigurationError, Preempted
from ..system.failure_records import INTERRUPTED, write_atomically

# Ends that starting again would not change, or that somebody wanted.
_FINAL = frozenset({0, ConfigurationError.exit_code, CheckpointError.exit_code, Preempted.exit_code, INTERRUPTED})
# The wait before a restart: doubled after each failure that came no further than the one before.
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 60.0


class Restarts:
    """How often the ranks of a launch have been started again, and whether they may be once more."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.done = 0
        self.refusal = ""
        """Why the ranks are not started again, where somebody may have hoped for it."""
        self._step: int | None = None
        self._setbacks = 0

    def after(self, exit_code: int, step: int | None) -> float | None:
        """Return how many seconds to wait before the ranks are started again, or None where they are not to be.

        ``step`` is the optimizer step at which they failed, None where training had not begun.
        """
        self.refusal = ""
        if not self.allowed or exit_code in _FINAL:
            return None
        if self.done and step == self._step:
            where = "their start" if step is None else f"optimizer step {step}"
            self.refusal = f"the ranks are not started again, since {where} failed twice in a row"
        elif self.done >= self.allowed:
            self.refusal = f"the ranks are not started again, since max_restarts={self.allowed} are used up"
        if self.refusal:
            return None
        further = step is not None and (self._step is None or step > self._step)
        self._setbacks = 0 if further else self._setbacks + 1
        self._step = step
        self.done += 1
        return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0**self._setbacks)


@dataclass(frozen=True)
class FitPlace:
    """Where a fit of a launch writes."""

    version: int
    directory: str
    """The run's directory; empty for a run that keeps no files."""
    identity: str | None
    """What its checkpoints carry, also those in a folder that other runs share; None as long as it keeps none."""


def attempt_directory(launch_directory: str, attempt: int) -> str:
    """Return where the ranks of an attempt leave their notes."""
    return str(Path(launch_directory) / f"attempt_{attempt}")


def fits(directory: str) -> list[FitPlace]:
    """Return where the fits of an attempt write, in order."""
    found: list[FitPlace] = []
    while (path := _path(directory, len(found))).exists():
        found.append(FitPlace(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def record_fit(directory: str, place: FitPlace) -> None:
    """Add a fit to those of an attempt."""
    write_atomically(_path(directory, len(fits(directory))), json.dumps(asdict(place)))


def run_directory(directory: str) -> Path | None:
    """Return the directory of the first fit of an attempt that keeps files, or None as long as there is none."""
    return next((Path(place.directory) for place in fits(directory) if place.directory), None)


def earlier_fit(directory: str, attempt: int) -> FitPlace | None:
    """Return where the fit that ``attempt`` has come to wrote in the attempt before that came to it, or None."""
    number = len(fits(directory))
    for before in range(attempt - 1, -1, -1):
        there = fits(attempt_directory(str(Path(directory).parent), before))
        if len(there) > number:
            return there[number]
    return None


def _path(directory: str, number: int) -> Path:
    return Path(directory) / f"fit_{number}.json"
