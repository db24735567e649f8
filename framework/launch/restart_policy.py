"""``RestartPolicy``: decides on restarts of failed ranks; also the records by which a fit finds its predecessor.

The ranks of the next attempt run the script from its beginning. Each fit of an attempt records its directory, and the
n-th fit of the next attempt continues in the directory of the n-th fit of the previous attempt, never in that of an
older run with the same name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigurationError, Preempted
from ..system.environment import ranks_are_restarted
from ..system.failure_records import INTERRUPTED, write_atomically

# Exit codes after which a restart would fail in the same way, or which the user requested.
FINAL = frozenset({0, ConfigurationError.exit_code, CheckpointError.exit_code, Preempted.exit_code, INTERRUPTED})
# Seconds before a restart after a failure without progress since the previous one; doubled after each of them.
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 60.0


def why_never_restarted(launcher: str | None, max_restarts: int) -> str | None:
    """Return why the ``max_restarts`` of a program has no effect; None if its launcher restarts the ranks."""
    if launcher is None:
        return "there is no script to run again"
    if launcher != "phalanx":
        return f"{launcher} started it"
    if ranks_are_restarted():
        return None
    return (
        "its processes were started without restarts: give them to phalanx launch, as --max-restarts "
        f"{max_restarts}, or to the Trainer or Fabric that starts the processes of the script"
    )


class RestartPolicy:
    """Counts the restarts of a launch, and decides whether to restart again."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.done = 0
        self.attempt = 0
        """The number of the attempt, from 0: restarts with smaller micro-batches are not limited."""
        self.refusal = ""
        """The reason why the ranks are not restarted although the user has requested restarts."""
        self._step: int | None = None
        self._setbacks = 0

    @property
    def progress(self) -> list[Any]:
        """All on which decisions depend, as JSON values."""
        return [self.allowed, self.done, self.attempt, self._step, self._setbacks]

    def adopt(self, progress: Sequence[Any]) -> None:
        """Decide from now on as the policy with this ``progress``."""
        self.allowed, self.done, self.attempt, self._step, self._setbacks = progress

    def wait_before_restart(self, exit_code: int, step: int | None) -> float | None:
        """Return the number of seconds to wait before the restart, or None to give up.

        ``step`` is the optimizer step at which the ranks failed, None if training had not begun.
        """
        self.refusal = ""
        if not self.allowed or exit_code in FINAL:
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
        self.attempt += 1
        return 0.0 if further else min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (self._setbacks - 1))


@dataclass(frozen=True)
class FitRecord:
    """The directory and the identity of a fit of a launch."""

    version: int
    directory: str
    """The run's directory; empty for a run without files."""
    identity: str | None
    """The run's identity in its checkpoints, which may share a folder with other runs; None before it is known."""


def attempt_directory(launch_directory: str, attempt: int) -> str:
    """Return the directory for the records of an attempt."""
    return str(Path(launch_directory) / f"attempt_{attempt}")


def fits(directory: str) -> list[FitRecord]:
    """Return the fits of an attempt, in order."""
    found: list[FitRecord] = []
    while (path := _path(directory, len(found))).exists():
        found.append(FitRecord(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def record_fit(directory: str, fit: FitRecord) -> None:
    """Add a fit to the records of an attempt."""
    write_atomically(_path(directory, len(fits(directory))), json.dumps(asdict(fit)))


def num_loops(directory: str) -> int:
    """Return the number of loops of a Fabric in an attempt that have opened memory for snapshots."""
    return len([*Path(directory).glob("loop_*")])


def record_loop(directory: str) -> None:
    """Add a loop of a Fabric to the records of an attempt."""
    (Path(directory) / f"loop_{num_loops(directory)}").touch()


def output_directory(directory: str) -> Path | None:
    """Return the directory of the first fit of an attempt that has files, or None if there is none yet."""
    return next((Path(fit.directory) for fit in fits(directory) if fit.directory), None)


def run_directory(directory: str) -> Path | None:
    """Return the directory of the newest fit of an attempt; None if there is none yet, or if it has no files."""
    newest = fits(directory)[-1:]
    return Path(newest[0].directory) if newest and newest[0].directory else None


def memory_link(launch_directory: str) -> Path:
    """Return the link to the directory in memory that the attempts of a launch share."""
    return Path(launch_directory) / "memory"


def memory_of(directory: str) -> Path | None:
    """Return the directory in memory that an attempt shares with the others of its launch; None if there is none."""
    link = memory_link(str(Path(directory).parent))
    return link.resolve() if link.is_dir() else None


def record_smaller_micro_batch(directory: str, size: int) -> None:
    """Record that the current fit of an attempt ran out of memory, and the size of the next micro-batches."""
    write_atomically(_micro_batch(directory, len(fits(directory)) - 1), str(size))


def smaller_micro_batch(directory: str) -> int | None:
    """Return the size that ``record_smaller_micro_batch`` has recorded for the current fit; None if there is none."""
    return _number(_micro_batch(directory, len(fits(directory)) - 1))


def largest_micro_batch(directory: str, attempt: int) -> int | None:
    """Return the size of micro-batches that the next fit of ``attempt`` may use, by what earlier attempts found."""
    launch, number = str(Path(directory).parent), len(fits(directory))
    found = (_number(_micro_batch(attempt_directory(launch, before), number)) for before in range(attempt))
    return min((size for size in found if size is not None), default=None)


def _micro_batch(directory: str, fit: int) -> Path:
    return Path(directory) / f"fit_{fit}.micro_batch"


def _number(path: Path) -> int | None:
    return int(path.read_text(encoding="utf-8")) if path.exists() else None


def earlier_fit(directory: str, attempt: int) -> FitRecord | None:
    """Return the fit that corresponds to the next fit of ``attempt``, from the latest attempt with as many fits."""
    number = len(fits(directory))
    for before in range(attempt - 1, -1, -1):
        earlier = fits(attempt_directory(str(Path(directory).parent), before))
        if len(earlier) > number:
            return earlier[number]
    return None


def _path(directory: str, number: int) -> Path:
    return Path(directory) / f"fit_{number}.json"
