"""``render_comparison``: two runs as one page of HTML, with their curves in the same charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .charts import overlaid
from .comparison import LABELS, compared_text
from .document import run_name
from .loose import mapping, text
from .page import charts_section, framed
from .page_sections import card, table_of


def render_comparison(reports: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """Return the page of two reports.

    Args:
        reports: the reports.
        found: the result of ``compare_reports`` for them.
    """
    runs = _names(found["runs"])
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


def _names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of the paths of two runs, as many as it takes to tell them apart."""
    paths, count = list(map(text, paths)), 2
    while len(set(names := [run_name(Path(path), count) for path in paths])) < len(set(paths)):
        count += 1
    return names
