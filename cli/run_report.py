"""``phalanx report``: the report of a run in the terminal, and its page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..framework.core.errors import StorageError
from ..framework.core.size_text import size_text
from ..framework.core.wording import counted
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.page import measured, render_page
from ..framework.report.run_files import PAGE, RunFiles
from ..framework.report.series import OWN_PREFIX
from ..framework.report.values import as_number, listed, mapping, rows, span_text, text, whole
from ..framework.report.verdicts import shortened_command
from ..framework.system.atomic_files import write_text
from .terminal_text import Curve, fitted_table, say_fitted, say_json, say_wrapped, shown_number, state_color

_MOST_METRICS, _MOST_CHECKPOINTS = 8, 3


def show_report(given: argparse.Namespace) -> int:
    """Print the report of a run and write its page; return the exit code."""
    directory = find_run(given.given_run)
    report = build_report(RunFiles(directory))
    page = _write_page(report, directory, given.out)
    if given.json:
        say_json({**report, "page": None if page is None else str(page)})
        return 0
    state = text(report["state"])
    say_fitted(f"{shown_path(directory)}  {state}", state_color(state))
    say_wrapped(report["why"]["sentence"])
    if report["why"]["lost"]:
        say_wrapped(report["why"]["lost"])
    _say_facts(report)
    _say_metrics(report)
    _say_checkpoints(report)
    for each in [*listed(report["warnings"])[-3:], *report["problems"]]:
        say_wrapped(f"note: {text(each)}")
    say_fitted(f"page     {shown_path(page) if page is not None else 'give --out FILE: the run cannot be written'}")
    return 0


def _write_page(report: dict[str, Any], directory: Path, out: str | None) -> Path | None:
    """Write the page; return its path, or None if the run's directory cannot be written and no other file was given."""
    target = directory / PAGE if out is None else Path(out)
    try:
        write_text(target, render_page(report))
    except StorageError:
        if out is not None:
            raise
        return target if target.exists() else None
    return target


def _say_facts(report: dict[str, Any]) -> None:
    settings = mapping(report["settings"])
    resolved = mapping(settings.get("resolved"))
    ranks = whole(resolved.get("world_size"))
    shown_ranks = "" if ranks is None else counted(ranks, "rank")
    how = [text(resolved.get("strategy")), shown_ranks, text(resolved.get("precision"))]
    commit = text(report["git_commit"])[:12] + (" with changes" if report["git_dirty"] else "")
    command = shortened_command(text(report["command"]), text(report["directory"]))
    pairs = [
        ("how", ", ".join(each for each in how if each)),
        ("result", ", ".join(f"{value} {label}" for value, label in measured(report))),
        ("from", " ".join(each for each in (command, commit and f"({commit})") if each)),
        ("changed", text(settings.get("changed"))),
    ]
    if whole(report["restarts"]):
        lost = sum(as_number(report[name]) or 0.0 for name in ("redone_seconds", "waited_seconds"))
        again = f"{counted(report['repeated_steps'], 'step')} trained again"
        total = span_text(as_number(report["total_seconds"]) or 0.0)
        pairs.append(("restarts", f"{report['restarts']}, {again}, {span_text(lost)} of {total} lost"))
    for name, value in pairs:
        if value:
            say_fitted(f"{name:<9}{value}")


def _say_metrics(report: dict[str, Any]) -> None:
    curves = mapping(report["curves"])
    lines: list[list[str | Curve]] = []
    for name, curve in _own_last(curves)[:_MOST_METRICS]:
        values = listed(mapping(curve).get("value"))
        known = [number for value in values if (number := as_number(value)) is not None]
        if known:
            ends = (shown_number(known[0]), shown_number(known[-1]), shown_number(min(known)), shown_number(max(known)))
            lines.append([name, *ends, Curve(values)])
    if lines:
        fitted_table(("metric", "first", "last", "least", "most", ""), lines, shortened_column=0)


def _own_last(curves: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return curves by name, those that phalanx measures itself after the others."""
    return sorted(curves.items(), key=lambda pair: pair[0].startswith(OWN_PREFIX))


def _say_checkpoints(report: dict[str, Any]) -> None:
    found = rows(report["checkpoints"])
    lines = []
    for each in found[-_MOST_CHECKPOINTS:]:
        size = whole(each.get("bytes"))
        state = "good" if each.get("complete") else text(each.get("problem")) or "incomplete"
        lines.append([text(each.get("name")), text(each.get("step")), "" if size is None else size_text(size), state])
    if lines:
        fitted_table((f"checkpoint ({report['checkpoints_count']} in all)", "step", "size", "state"), lines)
