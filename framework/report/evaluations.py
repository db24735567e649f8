"""``evaluations.jsonl`` in a run's directory: results of checkpoints that another process has evaluated.

    {"step", "time", "checkpoint", "tasks", "values": {name: number}}     one evaluation of one checkpoint

``step`` is the number of optimizer steps of the checkpoint. The file has a name of its own, as the process that trains
writes ``history.jsonl`` again from what it knows itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import MetricError
from ..storage.mirror import after_change
from ..system.atomic_files import storage_error
from .event_log import Events, append_lines, whole_lines
from .series import History, Series
from .values import as_number, text

EVALUATIONS_FILE = "evaluations.jsonl"
"""The name of the file."""
PREFIX = "eval/"
"""Names of the results of evaluations begin so."""


@dataclass(frozen=True)
class Evaluation:
    """The results of one checkpoint."""

    step: int
    """The number of optimizer steps of the checkpoint."""
    checkpoint: str
    """The name of the checkpoint."""
    tasks: str
    """The name of the file of tasks or of the function."""
    values: dict[str, float]
    time: float = field(default_factory=time.time)
    """When it was evaluated, in seconds since 1970."""


def named_results(found: Any) -> dict[str, float]:
    """Return the numbers of an evaluation under the names by which they are logged.

    Raises:
        MetricError: it is not a mapping of names to numbers.
    """
    if not isinstance(found, Mapping):
        raise MetricError(f"the evaluation returned {type(found).__name__}: return a dict of numbers by name.")
    results: dict[str, float] = {}
    for name, value in found.items():
        try:
            results[f"{PREFIX}{name}"] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise MetricError(
                f"the evaluation returned {type(value).__name__} for {name!r}: return a dict of numbers by name."
            ) from None
    return results


def add_evaluation(directory: Path, evaluation: Evaluation) -> None:
    """Record the results of a checkpoint of a run.

    Raises:
        StorageError: they cannot be written.
    """
    path = directory / EVALUATIONS_FILE
    try:
        append_lines(path, [asdict(evaluation)])
    except OSError as error:
        raise storage_error("writing", path, error) from error
    after_change(path)


def evaluations_of(directory: Path) -> list[Evaluation]:
    """Return the evaluations of a run in the order in which they were made. Lines that are damaged are left out."""
    return [found for line in whole_lines(directory / EVALUATIONS_FILE) if (found := _parsed(line)) is not None]


def new_evaluations(path: Path, position: int) -> tuple[list[Evaluation], int]:
    """Return the evaluations in a file after a position in bytes, and the position after them."""
    try:
        if path.stat().st_size <= position:
            return [], position
        with path.open("rb") as file:
            file.seek(position)
            text = file.read()
    except OSError:
        return [], position
    # The last line may be in the middle of being written.
    whole = text[: text.rfind(b"\n") + 1]
    found = [each for line in whole.splitlines() if (each := _parsed(line)) is not None]
    return found, position + len(whole)


def _parsed(line: bytes) -> Evaluation | None:
    try:
        given = json.loads(line)
        step, seconds = as_number(given["step"]), as_number(given["time"])
        numbers = {str(name): as_number(value) for name, value in given["values"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if step is None or seconds is None:
        return None
    values = {name: number for name, number in numbers.items() if number is not None}
    return Evaluation(int(step), text(given.get("checkpoint")), text(given.get("tasks")), values, seconds)


def current(evaluations: Iterable[Evaluation], events: Events) -> list[Evaluation]:
    """Return the evaluations of weights that the run has gone on from.

    Of a step that a later attempt has trained again, from an earlier checkpoint, the weights are others.
    """
    return [
        each
        for each in evaluations
        if not any(attempt.began > each.time and attempt.step < each.step for attempt in events.attempts)
    ]


def add_to_history(history: History, evaluations: Iterable[Evaluation]) -> None:
    """Add the results to the series of a run, at the indices of their steps."""
    added: dict[str, dict[int, tuple[float, float]]] = {}
    for each in evaluations:
        for name, value in each.values.items():
            # The values of a step are under its index, which is the number of steps before it.
            added.setdefault(name, {})[max(0, each.step - 1)] = (each.time, value)
    for name, points in added.items():
        known = history.series.get(name, Series())
        own = zip(known.steps, zip(known.times, known.values, strict=True), strict=True)
        merged = Series()
        for step, (seconds, value) in sorted({**dict(own), **points}.items()):
            merged.add(step, seconds, value)
        history.series[name] = merged


def latest(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    """Return the newest value of each name."""
    return {
        name: value for each in sorted(evaluations, key=lambda each: each.step) for name, value in each.values.items()
    }
