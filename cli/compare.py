"""``phalanx compare``: the settings and curves of two runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..framework.report.comparison import compare_reports
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.loose import listed, mapping, text
from ..framework.report.run_files import RunFiles
from ..framework.report.series import as_number
from ..framework.report.times import span_text
from .looks import Curve, fitted_table, line_width, say_fitted, shortened, shown_number
from .output import say, say_json

_MOST_METRICS = 12
_LEAST_COLUMN = 16


def compare_runs(given: argparse.Namespace) -> int:
    """Print two runs side by side; return the exit code."""
    directories = [find_run(each, Path()) for each in (given.first, given.second)]
    reports = [build_report(RunFiles(directory)) for directory in directories]
    found = compare_reports(*reports)
    if given.json:
        say_json(found)
        return 0
    names = [shown_path(directory) for directory in directories]
    say_fitted(f"A  {names[0]}")
    say_fitted(f"B  {names[1]}")
    _say_settings(found["settings"])
    _say_results(found["results"])
    _say_metrics(found["metrics"], reports)
    return 0


def _say_settings(settings: dict[str, list[Any]]) -> None:
    if not settings:
        say("the same settings, versions and command")
        return
    names = max(map(len, settings))
    # Both columns get the same share of the terminal.
    each = max(_LEAST_COLUMN, (line_width() - names - 4) // 2)
    lines = [[name, *(shortened(_value(value), each) for value in pair)] for name, pair in settings.items()]
    fitted_table(("setting", "A", "B"), lines)


def _value(value: Any) -> str:
    return "-" if value is None else text(value)


def _say_results(results: dict[str, list[Any]]) -> None:
    lines = [
        [name.replace("_", " "), *(_result(name, value) for value in pair)]
        for name, pair in results.items()
        if pair != [None, None]
    ]
    fitted_table(("result", "A", "B"), lines)


def _result(name: str, value: Any) -> str:
    if name == "duration_seconds" and (seconds := as_number(value)) is not None:
        return span_text(seconds)
    if name == "best_score" and mapping(value):
        return f"{text(value.get('name'))} {shown_number(value.get('value'))}"
    return _value(value)


def _say_metrics(metrics: dict[str, list[dict[str, Any] | None]], reports: list[dict[str, Any]]) -> None:
    if not metrics:
        return
    lines = []
    for name, pair in list(metrics.items())[:_MOST_METRICS]:
        line: list[str | Curve] = [name]
        for numbers, report in zip(pair, reports, strict=True):
            values = listed(mapping(mapping(report["curves"]).get(name)).get("value"))
            line += ["-" if numbers is None else shown_number(numbers["last"]), Curve(values)]
        lines.append([*line, _difference(pair)])
    fitted_table(("metric", "A last", "", "B last", "", "B - A"), lines, yielding=0)
    if len(metrics) > _MOST_METRICS:
        say(f"{len(metrics) - _MOST_METRICS} more metrics: --json has all")


def _difference(pair: list[dict[str, Any] | None]) -> str:
    first, second = pair
    return "" if first is None or second is None else f"{second['last'] - first['last']:+.3g}"
