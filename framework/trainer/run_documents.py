"""The documents in the directory of a run: ``config.json``, how it was started, and ``report.json``, how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.callback import Callback, saved_by
from ..resume.checkpoint_search import newest_of_run
from ..system.provenance import provenance
from ..system.run_directory import REPORT
from .resolved_settings import Settings

if TYPE_CHECKING:
    from ..run.run import Run
    from .session import Session


def configuration(session: Session) -> dict[str, Any]:
    """Return the content of ``config.json``: arguments, what they were resolved to, plug-ins, and the provenance."""
    resources = session.fabric.resources
    return {
        "trainer": arguments(session.settings),
        "resolved": {
            "accelerator": resources.device_type,
            "devices": resources.devices,
            "num_nodes": resources.num_nodes,
            "world_size": resources.world_size,
            "strategy": resources.strategy.name,
            "precision": resources.precision.name,
            "seed": session.seed,
            "accumulate_grad_batches": str(session.accumulation),
            "max_epochs": session.settings.max_epochs,
            "default_root_dir": str(session.settings.root),
        },
        "callbacks": [type(callback).__name__ for callback in session.callbacks],
        "loggers": [type(logger).__name__ for logger in session.loggers],
        **provenance(),
    }


def arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of a Trainer under their own names, as JSON values that ``Trainer`` accepts again.

    Times are dicts. Arguments that are or hold objects, such as callbacks, are left out.
    """
    given = {each.name: _plain(getattr(settings.given, each.name)) for each in fields(settings.given)}
    if isinstance(settings.given.stall_timeout, timedelta):
        # As a dict it would be read as one by section.
        given["stall_timeout"] = settings.given.stall_timeout.total_seconds()
    return {name: value for name, value in given.items() if _survives(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _survives(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON and read again."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def checkpoints(run: Run, callbacks: list[Callback]) -> tuple[str, str]:
    """Return the paths of the best checkpoint, and of the newest that the run can be resumed from; empty for none."""
    best = next((str(saved.best_model_path) for saved in saved_by(callbacks) if saved.best_model_path), "")
    return best, str(newest_of_run(run.directory, callbacks) or "")


def report(session: Session, run: Run, exit_code: int) -> dict[str, Any]:
    """Return the content of ``report.json``, the outcome of a fit. Times are in UTC."""
    progress, throughput = run.progress, run.meter.throughput()
    best, last = checkpoints(run, session.callbacks)
    ended = time.time()
    return {
        "exit_code": exit_code,
        "stopped": run.stop_reason,
        "began": _timestamp(session.began),
        "ended": _timestamp(ended),
        "duration_seconds": round(ended - session.began, 3),
        "epochs": progress.epoch,
        "optimizer_steps": progress.global_step,
        "throughput": None if throughput is None else throughput.as_dict(),
        "best_checkpoint": best or None,
        "last_checkpoint": last or None,
        "metrics": {name: float(value) for name, value in run.metrics.view("callback").items()},
    }


def add_results(session: Session, stage: str, results: list[Mapping[str, float]]) -> None:
    """Add the results of ``validate`` or ``test`` to the report of the fit before it, if there is one.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        known = json.loads((session.directory.path / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    session.directory.write_json(REPORT, {**known, stage: results})


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
