"""``phalanx runs``: the runs below a directory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ..framework.report.finding import find_runs, shown_path
from ..framework.report.overview import overview
from ..framework.report.values import mapping, parsed_time, span_text, text
from .terminal_text import fitted_table, say, say_json, shown_number, state_color


def list_runs(given: argparse.Namespace) -> int:
    """Print the runs below a directory; return the exit code."""
    if given.limit < 0:
        given.parser.error(f"--limit {given.limit}: give a number of runs, or 0 for all")
    found = find_runs(Path(given.directory))
    shown = [overview(path) for path in (found[: given.limit] if given.limit else found)]
    if given.json:
        say_json({"schema": 1, "count": len(found), "runs": shown})
        return 0
    if not found:
        say(f"{given.directory} holds no runs.")
        return 0
    head = ("run", "state", "step", "epochs", "time", "began", "result")
    fitted_table(head, [_line(each) for each in shown], [state_color(each["state"]) for each in shown])
    if len(found) > len(shown):
        say(f"{len(found) - len(shown)} older runs are not shown: --limit 0 lists all")
    return 0


def _line(one: dict[str, Any]) -> list[str]:
    began = parsed_time(one["began"])
    seconds = one["total_seconds"]
    step = "-" if one["step"] is None else f"{one['step']:,}"
    return [
        shown_path(Path(one["path"])),
        text(one["state"]),
        step,
        "-" if one["epochs"] is None else f"{one['epochs']:,}",
        "-" if seconds is None else span_text(seconds),
        "-" if began is None else f"{span_text(max(0.0, time.time() - began), 1)} ago",
        _result(one),
    ]


def _result(one: dict[str, Any]) -> str:
    """Return the best value of a run, or its last ones, those of validation first.

    Numbers come before names, of which a narrow terminal has the beginning alone.
    """
    best = mapping(one["best_score"])
    if best:
        return f"{shown_number(best.get('value'))} {text(best.get('name'))}"
    names = sorted(one["metrics"], key=lambda name: (not name.startswith("val"), "loss" not in name, name))
    return ", ".join(f"{shown_number(one['metrics'][name])} {name}" for name in names[:2])
