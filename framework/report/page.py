"""``render_page``: the report of a run as one page of HTML, without a server and without files from elsewhere.

Every text of the run, such as a metric's name, is escaped: it may contain anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from .charts import Chart, bytes_text, charts_of, draw
from .loose import listed, mapping, rows, text, whole
from .page_script import SCRIPT
from .page_sections import (
    attempts_section,
    checkpoints_section,
    machine_section,
    memory_section,
    model_section,
    results_section,
    settings_section,
    warnings_section,
)
from .page_style import STYLE
from .series import MEMORY, as_number
from .times import number_text, span_text
from .verdicts import shortened_command

_PILLS = {"finished": "good", "running": "good", "preempted": "warn", "interrupted": "warn", "silent": "warn"}
_MOST_TRACEBACK = 20_000


def render_page(report: dict[str, Any]) -> str:
    """Return the page of a report."""
    body = "".join((
        _head(report), _tiles(report), _charts(report),
        warnings_section(report), attempts_section(report),
        '<div class="cols">', settings_section(report), machine_section(report), model_section(report),
        memory_section(report), results_section(report), "</div>",
        checkpoints_section(report), _foot(report),
    ))  # fmt: skip
    return framed(text(report.get("run")), body)


def framed(title: str, body: str) -> str:
    """Return a whole page around its content."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main>"
        f"<script>{SCRIPT}</script></body></html>"
    )


def _head(report: dict[str, Any]) -> str:
    state, why = text(report.get("state")), mapping(report.get("why"))
    sentence = text(why.get("sentence"))
    parts = [
        f'<div class="head"><h1>{escape(text(report.get("run")))}</h1>',
        f'<span class="pill {_PILLS.get(state, "bad")}">{escape(state)}</span></div>',
        f'<p class="why">{escape(sentence[:1].upper() + sentence[1:])}.</p>',
    ]
    if lost := text(why.get("lost")):
        parts.append(f'<p class="soft" style="margin:4px 0 0">{escape(lost[:1].upper() + lost[1:])}.</p>')
    if resume := text(why.get("resume")):
        parts.append(_command(resume))
    if trace := text(report.get("traceback")) or _long(report.get("stopped")):
        parts.append(f"<details><summary>traceback</summary><pre>{escape(trace[-_MOST_TRACEBACK:])}</pre></details>")
    return "".join(parts)


def _long(stopped: Any) -> str:
    """Return the reason of the end if it has more lines than the sentence shows."""
    return stopped if isinstance(stopped, str) and "\n" in stopped.strip() else ""


def _command(resume: str) -> str:
    command, _, remark = resume.partition("   ")
    shown = f'<p class="soft small" style="margin:6px 0 0">{escape(remark.strip())}</p>' if remark else ""
    return (
        f'<div class="cmd"><code>{escape(command)}</code>'
        f'<button type="button" data-copy="{escape(command)}">copy</button></div>{shown}'
    )


def _tiles(report: dict[str, Any]) -> str:
    found = "".join(
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles(report)
    )
    return f'<div class="tiles">{found}</div>'


def tiles(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the numbers that summarize a run and its restarts, each with its label."""
    yield from measured(report)
    if restarts := whole(report.get("restarts")):
        lost = sum(as_number(report.get(name)) or 0.0 for name in ("redone_seconds", "waited_seconds"))
        yield f"{restarts:,}", f"{'restart' if restarts == 1 else 'restarts'}, {span_text(lost)} lost"


def measured(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the results of a run, each with its label."""
    best = mapping(report.get("best_score"))
    if best:
        yield number_text(as_number(best.get("value"))), f"best {text(best.get('name'))}"
    for name, label in (("optimizer_steps", "optimizer steps"), ("epochs", "epochs")):
        if (count := whole(report.get(name))) is not None:
            yield f"{count:,}", label
    if (seconds := as_number(report.get("duration_seconds"))) is not None:
        yield span_text(seconds), "of this attempt" if whole(report.get("restarts")) else "duration"
    yield from _metered(mapping(report.get("throughput"))) if report.get("throughput") else _speed(report)
    yield from _memory(report)


def _speed(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    last = (rows(report.get("attempts")) or [{}])[-1]
    trained = (whole(report.get("optimizer_steps")) or 0) - (whole(last.get("from_step")) or 0)
    if (seconds := as_number(report.get("duration_seconds"))) and trained > 0:
        yield number_text(float(f"{trained / seconds:.3g}")), "steps a second, on average"


def _memory(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    measured = mapping(mapping(report.get("memory")).get("measured"))
    on_device = as_number(measured.get("device_peak_bytes"))
    if (peak := on_device or as_number(measured.get("host_peak_bytes"))) is not None:
        yield bytes_text(peak), "memory at its peak" if on_device else "memory of rank 0's process"


def _metered(throughput: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if (rate := as_number(throughput.get("per_second"))) is not None:
        yield number_text(float(f"{rate:.3g}")), f"{text(throughput.get('unit'))} a second in training"
    if (mfu := as_number(throughput.get("mfu"))) is not None:
        yield f"{mfu:.1%}", "of the devices' peak FLOPs (MFU)"
    if (share := as_number(throughput.get("data_share"))) is not None:
        yield f"{share:.1%}", "of the time waiting for data"


def _charts(report: dict[str, Any]) -> str:
    left_out = whole(report.get("curves_left_out")) or 0
    more = f'<p class="soft small">{left_out} more names were logged than a report holds.</p>' if left_out else ""
    return charts_section(charts_of(mapping(report.get("curves"))), more)


def charts_section(charts: Iterable[Chart], more: str = "") -> str:
    """Return charts with their legends, those that phalanx measures at the end; ``more`` is HTML below them."""
    boxes: dict[bool, list[str]] = {False: [], True: []}
    for chart in charts:
        legend = "".join(
            f'<span><i class="b{line.color}"></i>{escape(line.label)} <b>{escape(_last(line))}</b></span>'
            for line in chart.lines
        )
        boxes[chart.own].append(
            f'<div class="card chartbox"><header><h3>{escape(chart.title)}</h3><div class="legend">{legend}</div>'
            f"</header>{draw(chart)}</div>"
        )
    if not any(boxes.values()):
        return '<h2>Curves</h2><div class="card soft">No value was logged.</div>'
    grids = (
        f'<div class="charts">{"".join(boxes[False])}</div>',
        f'<div class="charts three">{"".join(boxes[True])}</div>',
    )
    return f"<h2>Curves</h2>{''.join(grids)}{more}"


def _last(line: Any) -> str:
    return bytes_text(line.values[-1]) if line.name == MEMORY else number_text(line.values[-1])


def _foot(report: dict[str, Any]) -> str:
    versions = mapping(report.get("versions"))
    command = escape(shortened_command(text(report.get("command")), text(report.get("directory"))))
    problems = "".join(f"<li>{escape(text(each))}</li>" for each in listed(report.get("problems")))
    noted = f'<ul class="plain">{problems}</ul>' if problems else ""
    return (
        f"<footer>{noted}<p>Made by phalanx {escape(text(versions.get('phalanx')))} from the files in "
        f"<code>{escape(text(report.get('path')))}</code>{f', started by <code>{command}</code>' if command else ''}."
        "</p></footer>"
    )
