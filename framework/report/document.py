"""``build_report``: the report of a run, made from the files in its directory. ``docs/report.md`` has the schema."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..core.errors import StorageError
from ..system.run_directory import CONFIGURATION
from .attempts import summarize_attempts
from .loose import text, whole
from .rewinds import rewinds_of
from .run_files import RunFiles
from .saved import best_checkpoint, saved_checkpoints
from .series import OWN_PREFIX, History, as_number
from .times import timestamp
from .verdicts import explain

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
    found["why"] = explain(found, config.get("ckpt_path"), (files.directory / CONFIGURATION).exists())
    complete: dict[str, Any] = finite({
        **found,
        "progress": _progress(files),
        "settings": {name: config.get(name) for name in _SETTINGS},
        "model": config.get("model"),
        "memory": {"planned": config.get("memory_plan"), "measured": files.status.get("memory")},
        "curves": curves_of(events.history),
        "curves_left_out": len(events.history.left_out),
        **summarize_attempts(events.attempts),
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
    metrics = {name: value for name, value in files.events.history.latest().items() if _is_logged(name)}
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


def _is_logged(name: str) -> bool:
    return name != "epoch" and not name.startswith(OWN_PREFIX)


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
