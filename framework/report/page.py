"""``render_page``: the report of a run as one page of HTML, without a server and without files from elsewhere.

Every text of the run, such as a metric's name, is escaped: it may contain anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .charts import Chart, bytes_text, charts_of, draw
from .page_assets import SCRIPT, STYLE
from .run_files import verdict_of
from .series import MEMORY
from .values import as_number, listed, mapping, number_text, parsed_time, rows, span_text, text, whole
from .verdicts import shortened_command

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
        f'<span class="pill {verdict_of(state)}">{escape(state)}</span></div>',
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
        total = span_text(as_number(report.get("total_seconds")) or 0.0)
        yield f"{restarts:,}", f"{'restart' if restarts == 1 else 'restarts'}, {span_text(lost)} of {total} lost"


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


# ---- sections below the curves; one without content is an empty text ------------------------------------------------


def settings_section(report: dict[str, Any]) -> str:
    """Settings that differ from the defaults, and what was chosen for the others."""
    settings = mapping(report.get("settings"))
    resolved = mapping(settings.get("resolved"))
    hparams = mapping(mapping(report.get("model")).get("hparams"))
    changed = mapping(settings.get("changed")).items()
    parts = [("Settings that differ from the defaults", facts([(name, text(value)) for name, value in changed]))]
    parts.append(("Hyperparameters", facts([(name, text(value)) for name, value in hparams.items()])))
    names = (
        "strategy",
        "parallel",
        "precision",
        "accelerator",
        "world_size",
        "num_nodes",
        "accumulate_grad_batches",
        "seed",
    )
    chosen = [(name.replace("_", " "), text(resolved.get(name))) for name in names if resolved.get(name) is not None]
    chosen += [(name, text(settings.get(name))) for name in ("callbacks", "loggers") if settings.get(name)]
    parts.append(("As resolved", facts(chosen)))
    return "".join(card(title, body) for title, body in parts)


def machine_section(report: dict[str, Any]) -> str:
    """The command, the commit and the machine of the run."""
    machine, versions = mapping(report.get("machine")), mapping(report.get("versions"))
    commit = text(report.get("git_commit"))
    dirty = " with changes that are not committed" if report.get("git_dirty") else ""
    memory = as_number(machine.get("memory_bytes"))
    devices = [
        f"{text(each.get('name'))} ({bytes_text(as_number(each.get('memory_bytes')) or 0)})"
        for each in rows(machine.get("devices"))
    ]
    cores = whole(machine.get("cores"))
    pairs = [
        ("command", shortened_command(text(report.get("command")), text(report.get("directory")))),
        ("folder", text(report.get("directory"))),
        ("git commit", f"{commit[:12]}{dirty}" if commit else ""),
        ("versions", ", ".join(f"{name} {text(value)}" for name, value in versions.items())),
        ("host", text(report.get("host"))),
        ("processor", f"{cores} cores, {bytes_text(memory)} of memory" if cores and memory else ""),
        ("devices", ", ".join(f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices))),
        ("system", text(machine.get("system"))),
        ("began", _moment(report.get("began"))),
        ("ended", _moment(report.get("ended"))),
    ]
    body = facts([(name, value) for name, value in pairs if value])
    return card("What was run", body)


def attempts_section(report: dict[str, Any]) -> str:
    """Restarts and the time that they have cost; empty for a run that was not interrupted."""
    attempts = rows(report.get("attempts"))
    if len(attempts) < 2:
        return ""
    table = []
    for number, each in enumerate(attempts, 1):
        lost = whole(each.get("lost_steps")) or 0
        again = f"{lost:,} steps, {span_text(as_number(each.get('lost_seconds')) or 0.0)}" if lost else "-"
        steps = f"{_count(each.get('from_step'))} to {_count(each.get('to_step'))}"
        code = "" if each.get("exit_code") is None else f"exit code {text(each.get('exit_code'))}"
        end = text(each.get("stopped")) or code or "killed"
        origin = text(each.get("checkpoint")).rpartition("/")[2] or "the beginning"
        table.append([str(number), _moment(each.get("began")), _took(each), origin, steps, again, end])
    if report.get("state") in ("running", "silent"):
        table[-1][-1] = ""
    spans = (("redone_seconds", "trained again"), ("waited_seconds", "until ranks were started again"),
             ("paused_seconds", "between launches"))  # fmt: skip
    amounts = [(as_number(report.get(name)) or 0.0, label) for name, label in spans]
    goodput = as_number(report.get("goodput"))
    kept = "" if goodput is None else f"; {goodput:.1%} of the time of ranks was not lost"
    spent = ", ".join(f"{span_text(seconds)} {label}" for seconds, label in amounts if seconds >= 0.05)
    head = ["", "began", "time", "from", "steps", "trained again by the next", "end"]
    spent = f'<p class="soft small">{escape((spent or "no time was lost") + kept)}</p>'
    return card("Restarts and time lost", _bar(report, attempts) + spent + table_of(head, table))


def model_section(report: dict[str, Any]) -> str:
    """The model's parts and their parameters, and its optimizers."""
    model = mapping(report.get("model"))
    if not model:
        return ""
    total = whole(model.get("parameters")) or 0
    table = []
    for part in rows(model.get("parts")):
        count = whole(part.get("parameters")) or 0
        share = f"{count / total:.1%}" if total else "-"
        frozen = count - (whole(part.get("trainable")) or 0)
        table.append(
            [text(part.get("name")), text(part.get("type")), f"{count:,}", share, f"{frozen:,}" if frozen else ""]
        )
    head = ["part", "type", "parameters", "share", "frozen"]
    trainable = whole(model.get("trainable")) or 0
    size = bytes_text(as_number(model.get("bytes")) or 0.0)
    summary = f"{text(model.get('class'))}: {total:,} parameters, {trainable:,} of them trained, {size}"
    optimizers = "".join(
        f'<p class="small soft">{escape(text(each.get("type")))}: {escape(text(each.get("settings")))}</p>'
        for each in rows(model.get("optimizers"))
    )
    return card("Model", f'<p class="lead">{escape(summary)}</p>{table_of(head, table)}{optimizers}')


def memory_section(report: dict[str, Any]) -> str:
    """The planned memory of a rank beside what was measured."""
    memory = mapping(report.get("memory"))
    planned, measured = mapping(memory.get("planned")), mapping(memory.get("measured"))
    bars: list[tuple[str, list[tuple[str, float]]]] = []
    parts = [(name.replace("_", " "), as_number(value) or 0.0) for name, value in mapping(planned.get("parts")).items()]
    if parts:
        bars.append(("planned for a rank, without activations", parts))
    for name, label in (
        ("device_peak_bytes", "measured on rank 0's device at its peak"),
        ("host_peak_bytes", "measured of rank 0's process at its peak, with Python and libraries"),
    ):
        if (value := as_number(measured.get(name))) is not None:
            bars.append((label, [("", value)]))
    if not bars:
        return ""
    longest = max(sum(value for _, value in parts) for _, parts in bars) or 1.0
    return card("Memory, planned and measured", "".join(_memory_bar(*each, longest) for each in bars))


def _memory_bar(label: str, parts: list[tuple[str, float]], longest: float) -> str:
    total = sum(value for _, value in parts)
    pieces = "".join(
        f'<i class="b{number % 6}" style="width:{100 * value / longest:.2f}%"></i>'
        for number, (_, value) in enumerate(parts)
    )
    named = "".join(
        f'<span><i class="b{number % 6}"></i>{escape(name)} {escape(bytes_text(value))}</span>'
        for number, (name, value) in enumerate(parts)
        if name
    )
    return (
        f'<div style="margin-bottom:14px"><div class="small"><b>{escape(bytes_text(total))}</b> '
        f'<span class="soft">{escape(label)}</span></div><div class="bar">{pieces}</div>'
        f'<div class="legend">{named}</div></div>'
    )


def results_section(report: dict[str, Any]) -> str:
    """The last values of all metrics, and the results of ``validate`` and ``test`` after the fit."""
    groups = [("at the end of the fit", mapping(report.get("metrics")))]
    for stage in ("validate", "test"):
        groups += [(stage, each) for each in rows(report.get(stage))]
    table = [
        [name, number_text(as_number(value)), label] for label, found in groups for name, value in sorted(found.items())
    ]
    return card("Results", table_of(["metric", "value", "of"], table)) if table else ""


def checkpoints_section(report: dict[str, Any]) -> str:
    """The checkpoints on the disk, the furthest first."""
    found = rows(report.get("checkpoints"))
    if not found:
        return ""
    best, table = text(report.get("best_checkpoint")), []
    for each in reversed(found):
        metric, size = mapping(each.get("metric")), as_number(each.get("bytes"))
        value = f"{text(metric.get('name'))} {number_text(as_number(metric.get('value')))}" if metric else ""
        state = "good" if each.get("complete") else text(each.get("problem")) or "incomplete"
        name = text(each.get("name")) + (" (best)" if best and text(each.get("path")) == best else "")
        table.append([name, _count(each.get("step")), value, "" if size is None else bytes_text(size),
                      _moment(each.get("saved_at")), state])  # fmt: skip
    more = (whole(report.get("checkpoints_count")) or 0) - len(found)
    rest = f'<p class="soft small">{more} older checkpoints are not listed.</p>' if more > 0 else ""
    return card("Checkpoints", table_of(["name", "step", "metric", "size", "saved", "state"], table) + rest)


def warnings_section(report: dict[str, Any]) -> str:
    """The lines that phalanx has shown besides progress."""
    found = "".join(f"<li>{escape(text(each))}</li>" for each in listed(report.get("warnings")))
    return card("Warnings and notes", f'<ul class="plain">{found}</ul>') if found else ""


# ---- parts of sections --------------------------------------------------------------------------------------------


def card(title: str, body: str) -> str:
    """Return a titled box of HTML; empty without content."""
    return f'<section><h2>{escape(title)}</h2><div class="card">{body}</div></section>' if body else ""


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values; empty without any."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td class='mono'>{escape(value)}</td></tr>" for name, value in pairs)
    return f'<table class="facts">{lines}</table>' if lines else ""


_NUMERIC = {"parameters", "share", "frozen", "step", "steps", "size", "time", "value"}


def table_of(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table; columns of numbers are aligned at the right."""
    kinds = [' class="num"' if name in _NUMERIC else "" for name in head]
    titles = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, line, strict=True)) + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>' if body else ""


def _bar(report: dict[str, Any], attempts: list[dict[str, Any]]) -> str:
    """Return the attempts as a bar over time: training, what was trained again, and gaps."""
    pieces: list[tuple[str, float]] = []
    before: float | None = None
    for each in attempts:
        began, ended = (
            parsed_time(each.get("began")),
            parsed_time(each.get("ended")) or parsed_time(report.get("ended")),
        )
        if began is None or ended is None:
            continue
        if before is not None and began > before:
            pieces.append(("gap", began - before))
        lost = as_number(each.get("lost_seconds")) or 0.0
        pieces += [("done", max(0.0, ended - began - lost)), ("lost", lost)]
        before = ended
    total = sum(seconds for _, seconds in pieces)
    if not total:
        return ""
    return '<div class="bar">' + "".join(
        f'<i class="{kind}" style="width:{100 * seconds / total:.2f}%"></i>' for kind, seconds in pieces if seconds
    ) + "</div>"  # fmt: skip


def _took(attempt: dict[str, Any]) -> str:
    began, ended = parsed_time(attempt.get("began")), parsed_time(attempt.get("ended"))
    return "" if began is None or ended is None else span_text(ended - began)


def _count(value: Any) -> str:
    found = whole(value)
    return "" if found is None else f"{found:,}"


def _moment(value: Any) -> str:
    return f"{value[:10]} {value[11:19]} UTC" if isinstance(value, str) and parsed_time(value) is not None else ""
