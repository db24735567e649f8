"""``phalanx compare``: the settings and curves of two runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..framework.report.comparison import LABELS, compare_reports, compared_text, render_comparison
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles
from ..framework.report.values import listed, mapping
from ..framework.system.atomic_files import write_text
from .terminal_text import Curve, fitted_table, line_width, say, say_fitted, say_json, shortened, shown_number

_MOST_METRICS = 12
_LEAST_COLUMN = 16


def compare_runs(given: argparse.Namespace) -> int:
    """Print two runs side by side; return the exit code."""
    directories = [find_run(each) for each in (given.first, given.second)]
    reports = [build_report(RunFiles(directory)) for directory in directories]
    found = compare_reports(*reports)
    if given.out is not None:
        write_text(Path(given.out), render_comparison(reports, found))
    if given.json:
        say_json(found)
        return 0
    names = [shown_path(directory) for directory in directories]
    for label, name in zip(LABELS, names, strict=True):
        say_fitted(f"{label}  {name}")
    _say_settings(found["settings"])
    _say_results(found["results"])
    _say_metrics(found["metrics"], reports)
    if given.out is not None:
        say_fitted(f"page     {shown_path(Path(given.out))}")
    return 0


def _say_settings(settings: dict[str, list[Any]]) -> None:
    if not settings:
        say("the same settings, versions and command")
        return
    names = max(map(len, settings))
    # Both columns get the same share of the terminal.
    each = max(_LEAST_COLUMN, (line_width() - names - 4) // 2)
    lines = [
        [name, *(shortened(compared_text(name, value), each) for value in pair)] for name, pair in settings.items()
    ]
    fitted_table(("setting", *LABELS), lines)


def _say_results(results: dict[str, list[Any]]) -> None:
    lines = [
        [name.replace("_", " "), *(compared_text(name, value) for value in pair)]
        for name, pair in results.items()
        if pair != [None, None]
    ]
    fitted_table(("result", *LABELS), lines)


def _say_metrics(metrics: dict[str, list[dict[str, Any] | None]], reports: list[dict[str, Any]]) -> None:
    if not metrics:
        return
    lines = []
    for name, pair in list(metrics.items())[:_MOST_METRICS]:
        line: list[str | Curve] = [name]
        curves = [listed(mapping(mapping(report["curves"]).get(name)).get("value")) for report in reports]
        for numbers, values, other in zip(pair, curves, reversed(curves), strict=True):
            # Both have the range of both, so that the higher curve is drawn higher.
            line += ["-" if numbers is None else shown_number(numbers["last"]), Curve(values, other)]
        lines.append([*line, _difference(pair)])
    fitted_table(("metric", "A last", "", "B last", "", "B - A"), lines, shortened_column=0)
    if len(metrics) > _MOST_METRICS:
        say(f"{len(metrics) - _MOST_METRICS} more metrics: --json has all")


def _difference(pair: list[dict[str, Any] | None]) -> str:
    first, second = pair
    return "" if first is None or second is None else f"{second['last'] - first['last']:+.3g}"
