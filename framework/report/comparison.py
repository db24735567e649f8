"""Two reports side by side: what they were started with, what they reached, and a page with the curves of both."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts import overlaid
from .document import run_name
from .page import card, charts_section, framed, table_of
from .series import OWN_PREFIX
from .values import as_number, listed, mapping, number_text, span_text, text
from .verdicts import shortened_command

LABELS = ("A", "B")
"""The names of the two runs, where both are shown."""
_RESULTS = (
    "state", "exit_code", "optimizer_steps", "epochs", "duration_seconds", "restarts", "best_score",
)  # fmt: skip


def compare_reports(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the differences between two runs, as JSON values: each name with a list of two values."""
    return {
        "schema": 1,
        "runs": [first["path"], second["path"]],
        "settings": _differences(_settings(first), _settings(second)),
        "results": {name: [first.get(name), second.get(name)] for name in _RESULTS},
        "metrics": _metrics(first, second),
    }


def compared_text(name: str, value: Any) -> str:
    """Return a setting or a result of a run as text."""
    if name == "duration_seconds" and (seconds := as_number(value)) is not None:
        return span_text(seconds)
    if name == "best_score" and mapping(value):
        # The number first: a narrow terminal cuts off the end.
        return f"{number_text(as_number(value.get('value')))} {text(value.get('name'))}"
    return "-" if value is None else text(value)


def _settings(report: dict[str, Any]) -> dict[str, Any]:
    """Return all that a run was started with, under one name each."""
    settings, model = mapping(report.get("settings")), mapping(report.get("model"))
    found: dict[str, Any] = {**mapping(settings.get("resolved")), **mapping(settings.get("changed"))}
    # It is a part of the run's path.
    found.pop("default_root_dir", None)
    found |= {f"hparams.{name}": value for name, value in mapping(model.get("hparams")).items()}
    found |= {f"versions.{name}": value for name, value in mapping(report.get("versions")).items()}
    found["command"] = shortened_command(text(report.get("command")), text(report.get("directory")))
    found |= {name: report.get(name) for name in ("git_commit", "git_dirty", "host")}
    found |= {"parameters": model.get("parameters"), "optimizers": model.get("optimizers")}
    return found | {name: settings.get(name) for name in ("callbacks", "loggers")}


def _differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*first, *second])
    return {name: [first.get(name), second.get(name)] for name in names if first.get(name) != second.get(name)}


def _metrics(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[dict[str, Any] | None]]:
    """Return the numbers of each curve in both runs; None where a run has no such curve."""
    curves = mapping(first.get("curves")), mapping(second.get("curves"))
    names = sorted(dict.fromkeys([*curves[0], *curves[1]]), key=lambda name: name.startswith(OWN_PREFIX))
    return {name: [_numbers(one.get(name)) for one in curves] for name in names}


def _numbers(curve: Any) -> dict[str, Any] | None:
    steps, values = listed(mapping(curve).get("step")), listed(mapping(curve).get("value"))
    known = [
        (number, step) for step, value in zip(steps, values, strict=False) if (number := as_number(value)) is not None
    ]
    if not known:
        return None
    least, most = min(known), max(known)
    return {
        "last": known[-1][0], "last_step": known[-1][1], "min": least[0], "min_step": least[1],
        "max": most[0], "max_step": most[1],
    }  # fmt: skip


# ---- page -----------------------------------------------------------------------------------------------------------


def render_comparison(reports: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """Return the page of two reports.

    Args:
        reports: the reports.
        found: the result of ``compare_reports`` for them.
    """
    runs = _short_names(found["runs"])
    parts = [f'<div class="head"><h1>{escape(" and ".join(runs))}</h1></div>']
    for color, (label, path) in enumerate(zip(LABELS, found["runs"], strict=True)):
        mark = f'<i class="b{color}"></i>{label}'
        parts.append(f'<p class="legend"><span>{mark} <code>{escape(text(path))}</code></span></p>')
    curves = {label: mapping(report.get("curves")) for label, report in zip(LABELS, reports, strict=True)}
    parts.append(charts_section(overlaid(curves)))
    results = {name: pair for name, pair in found["results"].items() if pair != [None, None]}
    for title, pairs in (("Settings that differ", found["settings"]), ("Results", results)):
        lines = [
            [name.replace("_", " "), *(compared_text(name, value) for value in pair)] for name, pair in pairs.items()
        ]
        parts.append(card(title, table_of(["", *LABELS], lines)))
    return framed(" and ".join(runs), "".join(parts))


def _short_names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of the paths of two runs, as many as it takes to tell them apart."""
    paths, count = list(map(text, paths)), 2
    while len(set(names := [run_name(Path(path), count) for path in paths])) < len(set(paths)):
        count += 1
    return names
