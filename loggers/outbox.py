"""``Outbox``: the records of a run for a remote store, in a file, each recorded once however often the run resumes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from ..framework.metrics.json_lines import JsonLines, read_lines

_MEDIA = "media:"
# Numbers that JSON lacks, as JsonLines writes them.
_NOT_FINITE = {"nan", "inf", "-inf"}


class Outbox:
    """A file of records, one JSON object a line, with one key beside ``step`` and ``time`` that says what it is.

    ``metrics`` maps names to numbers, ``hparams`` holds hyperparameters, ``media`` a media item, and ``model`` a
    checkpoint.

    A remote store cannot drop points. A run that resumes therefore leaves the points after its checkpoint in the file,
    and ``add_metrics`` and ``add_media`` skip them when the run records them again.

    Args:
        path: the file; its directory must exist when the first record is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)
        self._repeats: Counter[tuple[int, str]] = Counter()
        # Metrics arrive in the writer thread, checkpoints in the training thread.
        self._lock = Lock()

    @property
    def size(self) -> int:
        """The size of the file in bytes, the position after all records."""
        with self._lock:
            return self._lines.size

    def resume(self, position: int | None, step: int) -> None:
        """Skip the points that are in the file already when they are recorded again.

        Args:
            position: the size of the file at the checkpoint; ``None`` if it is unknown.
            step: the checkpoint's number of optimizer steps, used without a ``position``.
        """
        repeats: Counter[tuple[int, str]] = Counter()
        for _, record in read_lines(self.path, position or 0):
            if position is not None or record.get("step", -1) >= step:
                repeats.update(_points(record))
        with self._lock:
            self._repeats = repeats

    def add_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics at a step, without those that the file holds from before the run resumed."""
        with self._lock:
            new = {key: value for key, value in metrics.items() if not self._is_repeat(step, key)}
            if new:
                self._lines.append({"step": step, "time": time.time(), "metrics": new})

    def add_media(self, media: Mapping[str, Any], step: int) -> None:
        """Record a media item at a step, unless the file holds it from before the run resumed."""
        with self._lock:
            if not self._is_repeat(step, _MEDIA + media["key"]):
                self._lines.append({"step": step, "time": time.time(), "media": media})

    def add(self, what: str, value: Mapping[str, Any]) -> None:
        """Record hyperparameters or a model."""
        with self._lock:
            self._lines.append({"time": time.time(), what: value})

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        with self._lock:
            self._lines.close()

    def _is_repeat(self, step: int, key: str) -> bool:
        if self._repeats[step, key] == 0:
            return False
        self._repeats[step, key] -= 1
        return True


def metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a record as numbers, which the file may hold as text."""
    metrics: dict[str, Any] = record["metrics"]
    return {key: float(value) if value in _NOT_FINITE else value for key, value in metrics.items()}


def _points(record: Mapping[str, Any]) -> list[tuple[int, str]]:
    if "metrics" in record:
        return [(record["step"], key) for key in record["metrics"]]
    return [(record["step"], _MEDIA + record["media"]["key"])] if "media" in record else []
