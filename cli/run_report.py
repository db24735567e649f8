"""``phalanx report``: the report of a run in the terminal, and its page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..framework.core.errors import StorageError
from ..framework.report.charts import bytes_text
from ..framework.report.document import build_report
from ..framework.report.finding import shown_path
from ..framework.report.loose import listed, mapping, rows, text, whole
from ..framework.report.page import render_page, tiles
from ..framework.report.run_files import PAGE, RunFiles
from ..framework.report.series import as_number
from ..framework.report.times import span_text
from ..framework.system.atomic_files import write_text
from .looks import fitted_table, painted, say_fitted, say_wrapped, shown_number, spark, state_color
from .output import printable, say, say_json
from .run_argument import add_command, add_run, run_of

_MOST_METRICS, _MOST_CHECKPOINTS = 8, 3


def add_commands(commands: Any) -> None:
    """Add ``report`` to the subparsers of a parser."""
    text = "show the report of a run, and write its page"
    parser = add_command(commands, "report", _run, text, "phalanx report phalanx_logs/version_3 --out report.html")
    add_run(parser)
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default: report.html of the run)")


def _run(given: argparse.Namespace) -> int:
    directory = run_of(given.given_run)
    report = build_report(RunFiles(directory))
    page = _write_page(report, directory, given.out)
    if given.json:
        say_json({**report, "page": None if page is None else str(page)})
        return 0
    state = text(report["state"])
    say(f"{painted(printable(shown_path(directory)), 'bold')}  {painted(printable(state), state_color(state))}")
    say_wrapped(f"{shown_path(directory)} {report['why']['sentence']}")
    if report["why"]["lost"]:
        say_wrapped(report["why"]["lost"])
    _say_facts(report)
    _say_metrics(report)
    _say_checkpoints(report)
    for each in [*listed(report["warnings"])[-3:], *report["problems"]]:
        say_wrapped(f"note: {text(each)}")
    say_fitted(f"page   {shown_path(page)}" if page is not None else "page   give --out FILE: the run cannot be written")
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
    how = [text(resolved.get("strategy")), "" if ranks is None else f"{ranks} ranks", text(resolved.get("precision"))]
    commit = text(report["git_commit"])[:12] + (" with changes" if report["git_dirty"] else "")
    pairs = [
        ("how", ", ".join(each for each in how if each)),
        ("result", ", ".join(f"{value} {label}" for value, label in tiles(report))),
        ("from", " ".join(each for each in (text(report["command"]), commit and f"({commit})") if each)),
        ("changed", text(settings.get("changed"))),
    ]
    if whole(report["restarts"]):
        lost = sum(as_number(report[name]) or 0.0 for name in ("redone_seconds", "waited_seconds"))
        pairs.append(("restarts", f"{report['restarts']}, {report['repeated_steps']} steps again, {span_text(lost)} lost"))
    for name, value in pairs:
        if value:
            say_fitted(f"{name:<9}{value}")


def _say_metrics(report: dict[str, Any]) -> None:
    curves = mapping(report["curves"])
    lines = []
    for name, curve in list(curves.items())[:_MOST_METRICS]:
        values = listed(mapping(curve).get("value"))
        known = [number for value in values if (number := as_number(value)) is not None]
        if known:
            ends = (shown_number(known[0]), shown_number(known[-1]), shown_number(min(known)), shown_number(max(known)))
            lines.append([name, *ends, spark(values)])
    if lines:
        fitted_table(("metric", "first", "last", "least", "most", ""), lines)


def _say_checkpoints(report: dict[str, Any]) -> None:
    found = rows(report["checkpoints"])
    lines = []
    for each in found[-_MOST_CHECKPOINTS:]:
        size = as_number(each.get("bytes"))
        state = "good" if each.get("complete") else text(each.get("problem")) or "incomplete"
        lines.append([text(each.get("name")), text(each.get("step")), "" if size is None else bytes_text(size), state])
    if lines:
        fitted_table((f"checkpoint ({report['checkpoints_count']} in all)", "step", "size", "state"), lines)
