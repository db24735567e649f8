"""Directories of runs as a fit leaves them, made without training: for tests of what reads them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from phalanx.framework.report.values import timestamp
from phalanx.framework.system.processes import start_of

HOSTILE = "loss</script><img src=x onerror=alert(1)>\x1b[31m\n\u202e\"'&"
# A process that cannot exist.
GONE = 2**31 - 2


def write_run(
    directory: Path,
    *,
    status: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
) -> Path:
    """Write the files of a run; parts that are not given are those of a run of 20 steps whose process has ended."""
    directory.mkdir(parents=True)
    # The outcome, if there is one, is that of this fit.
    age = 0.0 if report is None else 1e6
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (directory / "status.json").write_text(json.dumps(running(pid=GONE, age=age) if status is None else status))
    lines = EVENTS if events is None else events
    (directory / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    if report is not None:
        (directory / "report.json").write_text(json.dumps(report))
    return directory


def running(pid: int | None = None, host: str | None = None, age: float = 0.0) -> dict[str, Any]:
    """Return the status of a run: by default of one whose rank 0 is this process."""
    pid = os.getpid() if pid is None else pid
    now = time.time() - age
    return {
        "schema": 1, "state": "running", "began": now - 10.0, "updated": now, "pid": pid,
        "host": socket.gethostname() if host is None else host, "process_start": start_of(pid) or 1,
        "section": "step", "step": 20, "steps": 40, "epoch": 1, "max_epochs": 2, "batch": 4, "batches": 16,
        "steps_per_second": 2.0, "metrics": {"train/loss": 0.5}, "memory": {"used": 1000, "host_peak_bytes": 2000},
    }  # fmt: skip


def ended(exit_code: int, stopped: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the outcome of a run of 20 steps in a report."""
    now = time.time()
    return {
        "exit_code": exit_code, "stopped": stopped, "began": timestamp(now - 10.0), "ended": timestamp(now),
        "duration_seconds": 7452.0, "epochs": 1, "optimizer_steps": 20, "best_checkpoint": None,
        "last_checkpoint": None, "metrics": {"train/loss": 0.5, "val/loss": 0.75}, **more,
    }  # fmt: skip


CONFIG: dict[str, Any] = {
    "trainer": {"max_epochs": 2},
    "resolved": {"strategy": "ddp", "world_size": 2, "precision": "32-true", "seed": 1},
    "changed": {"max_epochs": 2},
    "callbacks": ["ModelCheckpoint"],
    "loggers": ["CSVLogger"],
    "command": "/usr/bin/python3.11 /home/u/train.py --lr 3",
    "directory": "/home/u",
    "host": "a",
    "versions": {"phalanx": "0.1.0", "torch": "2.13.0"},
    "git_commit": "0123456789abcdef",
    "git_dirty": True,
    "model": {"class": "Net", "parameters": 12, "trainable": 10, "bytes": 48, "hparams": {"lr": 3}, "parts": []},
    "memory_plan": {"parts": {"parameters": 48, "gradients": 48}},
}

EVENTS: list[dict[str, Any]] = [
    {"begin": {"time": 1000.0, "step": 0, "attempt": 0, "checkpoint": None, "pid": 1, "host": "a"}},
    *({"step": step, "time": 1000.0 + step, "values": {"train/loss": 2.0 - step / 10}} for step in range(0, 20, 2)),
    {"step": 19, "time": 1019.5, "values": {"val/loss": 0.75, "epoch": 0}},
    {"note": "a warning", "time": 1019.5},
]
