"""``build_report``: the report of a run, made from the files in its directory. ``docs/report.md`` has the schema."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import StorageError
from ..system.run_directory import CONFIGURATION
from .evaluations import current, latest
from .event_log import Attempt
from .rewinds import rewinds_of
from .run_files import RunFiles
from .saved import best_checkpoint, saved_checkpoints
from .series import History, is_logged
from .values import as_number, text, timestamp, whole
from .verdicts import explain, went_on

SCHEMA = 1
# Facts that only the process of the fit, or its supervisor, knows: the rest of the report is made from files.
OUTCOME = (
    "exit_code", "stopped", "traceback", "began", "ended", "duration_seconds", "epochs", "optimizer_steps",
    "best_checkpoint", "best_score", "last_checkpoint", "metrics", "throughput",
)  # fmt: skip
EVALUATIONS = ("validate", "test")
_STARTED = ("command", "directory", "host", "git_commit", "git_dirty", "versions", "machine")
_WHOLE = ("exit_code", "epochs", "optimizer_steps")
_SETTINGS = ("changed", "resolved", "callbacks", "loggers")


def build_report(files: RunFiles) -> dict[str, Any]:
    """Return the report of a run; numbers that are not finite are null."""
    config, events = files.config, files.events
    saved = saved_checkpoints(files)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run_name(files.directory),
        "path": str(files.directory),
        "state": files.state,
        **_outcome(files),
        "best_checkpoint": best_checkpoint(files, saved),
        **_started(config),
        "resume_from": saved.newest,
    }
    if evaluated := latest(current(files.evaluations, events)):
        found["metrics"] = {**(found["metrics"] or {}), **evaluated}
    attempts = summarize_attempts(events.attempts, found["duration_seconds"])
    found |= {name: attempts[name] for name in ("restarts", "total_seconds")}
    first = attempts["attempts"][0] if attempts["attempts"] else {}
    is_configured = (files.directory / CONFIGURATION).exists()
    found["why"] = explain({**found, "from_step": first.get("from_step")}, config.get("ckpt_path"), is_configured)
    complete: dict[str, Any] = finite({
        **found,
        "progress": _progress(files),
        "settings": {name: config.get(name) for name in _SETTINGS},
        "model": config.get("model"),
        "memory": {"planned": config.get("memory_plan"), "measured": files.status.get("memory")},
        "curves": curves_of(events.history),
        "curves_left_out": len(events.history.left_out),
        **attempts,
        "rewinds": _rewinds(files),
        "checkpoints": saved.rows,
        "checkpoints_count": saved.count,
        "warnings": events.notes,
        "problems": files.problems,
        # Absent until they have run.
        **{name: results for name in EVALUATIONS if (results := files.outcome.get(name)) is not None},
    })  # fmt: skip
    return complete


def _started(config: dict[str, Any]) -> dict[str, Any]:
    """Return from where and how the run was started."""
    found = {name: config.get(name) for name in _STARTED}
    for name in ("command", "directory", "host", "git_commit"):
        found[name] = text(found[name]) or None
    return found


def _rewinds(files: RunFiles) -> list[dict[str, Any]]:
    """Return when the run went back to a checkpoint, and a sentence about each time."""
    try:
        return [{**each.document(), "sentence": each.sentence} for each in rewinds_of(files.directory)]
    except StorageError as error:
        files.problems.append(str(error))
        return []


def _outcome(files: RunFiles) -> dict[str, Any]:
    """Return the end of the fit; what a killed process could not record comes from what it wrote while it trained."""
    end, status, attempts = files.outcome, files.status, files.events.attempts
    known = _typed(end)
    if not status and not attempts:
        return known
    began = as_number(status.get("began")) or (attempts[-1].began if attempts else 0.0)
    seen = as_number(status.get("updated")) or (attempts[-1].seen if attempts else began)
    metrics = {name: value for name, value in files.events.history.latest().items() if is_logged(name)}
    missing: dict[str, Any] = {
        "exit_code": status.get("exit_code"),
        "stopped": status.get("message"),
        "began": timestamp(began),
        "ended": None if files.state in ("running", "silent") else timestamp(seen),
        "duration_seconds": round(max(0.0, seen - began), 3),
        "epochs": status.get("epoch"),
        "optimizer_steps": status.get("step"),
        "metrics": metrics,
        "throughput": status.get("throughput"),
    }
    return known | {name: value for name, value in _typed(missing).items() if known[name] is None}


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``OUTCOME``, each of its type; None for those that are missing or of another one."""
    typed: dict[str, Any] = {}
    for name in OUTCOME:
        value = values.get(name)
        if name in _WHOLE:
            typed[name] = whole(value)
        elif name == "duration_seconds":
            typed[name] = as_number(value)
        elif name in ("best_score", "metrics", "throughput"):
            typed[name] = value if isinstance(value, dict) else None
        else:
            typed[name] = value if isinstance(value, str) else None
    return typed


def _progress(files: RunFiles) -> dict[str, Any]:
    """Return how far the run is, and how far it goes."""
    status = files.status
    names = ("section", "epoch", "batch", "batches", "step", "steps", "max_epochs", "steps_per_second", "updated")
    found = {name: status.get(name) for name in names}
    rate, step, steps = (as_number(found[name]) for name in ("steps_per_second", "step", "steps"))
    left = None
    if files.state == "running" and rate and step is not None and steps is not None and math.isfinite(steps):
        left = round(max(0.0, steps - step) / rate, 1)
    return {**found, "seconds_left": left, "ranks": files.ranks.get("ranks") if files.state == "running" else None}


def curves_of(history: History) -> dict[str, dict[str, list[Any]]]:
    """Return the series of a history: for each name the steps and the values, which may be null."""
    return {
        name: {"step": series.steps, "value": series.values}
        for name, series in history.series.items()
        if name != "epoch" and series.steps
    }


def run_name(directory: Path, count: int = 2) -> str:
    """Return the last parts of the path of a run's directory, which name it: ``phalanx_logs/version_3``."""
    return "/".join(directory.absolute().parts[-count:])


def finite(value: Any) -> Any:
    """Return JSON values with null in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


# ---- attempts -------------------------------------------------------------------------------------------------------


def summarize_attempts(attempts: Sequence[Attempt], duration: float | None = None) -> dict[str, Any]:
    """Return the attempts of a run and the time lost between them, as JSON values.

    ``duration`` is the time of the last attempt in seconds, by default that in which it has written something.

    ``redone_seconds`` is the time in which steps were trained that a later attempt has trained again.
    ``waited_seconds`` is the time between two attempts of the same launch, in which ranks were started again. Time
    between two launches, in which the run waited for its user or its queue, is ``paused_seconds``. ``goodput``
    is the share of the time without pauses, ``total_seconds``, that was not lost in the other two ways.
    """
    rows: list[dict[str, Any]] = []
    redone = waited = paused = 0.0
    repeated = 0
    for number, attempt in enumerate(attempts):
        end = attempt.ended if attempt.ended is not None else attempt.seen
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        lost_steps = 0 if following is None else max(0, attempt.reached - following.step)
        lost_seconds = 0.0
        if following is not None:
            lost_seconds = max(0.0, end - _time_of_step(attempt, following.step, end))
            gap = max(0.0, following.began - end)
            waited += gap if following.attempt else 0.0
            paused += 0.0 if following.attempt else gap
        redone, repeated = redone + lost_seconds, repeated + lost_steps
        rows.append({
            "began": timestamp(attempt.began),
            "ended": None if attempt.ended is None and following is None else timestamp(end),
            "from_step": attempt.step,
            "to_step": attempt.reached,
            "checkpoint": attempt.checkpoint,
            "exit_code": attempt.exit_code,
            "host": attempt.host,
            "restart": attempt.attempt,
            "lost_steps": lost_steps,
            "lost_seconds": round(lost_seconds, 3),
            "stopped": attempt.message or None,
        })  # fmt: skip
    first, last = (attempts[0], attempts[-1]) if attempts else (None, None)
    total = 0.0
    if first is not None and last is not None:
        end = last.ended if last.ended is not None else last.seen
        total = last.began - first.began - paused + (end - last.began if duration is None else duration)
    return {
        "attempts": rows,
        "goodput": round(max(0.0, 1 - (redone + waited) / total), 4) if total > 0 else None,
        "total_seconds": round(total, 3),
        "restarts": sum(not attempt.is_rewind for attempt in attempts[1:]),
        "went_on": [
            went_on(*pair)
            for pair, attempt in zip(itertools.pairwise(rows), attempts[1:], strict=True)
            if not attempt.is_rewind
        ],
        "repeated_steps": repeated,
        "redone_seconds": round(redone, 3),
        "waited_seconds": round(waited, 3),
        "paused_seconds": round(paused, 3),
    }


def _time_of_step(attempt: Attempt, step: int, end: float) -> float:
    """Return the time at which an attempt had trained ``step`` steps, as far as it is known."""
    before = [(at, seconds) for at, seconds in attempt.passed.items() if at <= step]
    return max(before)[1] if before and step < attempt.reached else end
