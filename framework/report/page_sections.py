"""The sections of the report's page below the curves. A section without content is an empty text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .charts import bytes_text
from .loose import listed, mapping, rows, text, whole
from .run_files import parsed_time
from .series import as_number
from .times import number_text, span_text
from .verdicts import shortened_command


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
        code = "" if each.get("exit_code") is None else text(each.get("exit_code"))
        table.append([str(number), _moment(each.get("began")), _took(each), steps, again, code or "killed"])
    if report.get("state") in ("running", "silent"):
        table[-1][-1] = ""
    spans = (("redone_seconds", "trained again"), ("waited_seconds", "until ranks were started again"),
             ("paused_seconds", "between launches"))  # fmt: skip
    amounts = [(as_number(report.get(name)) or 0.0, label) for name, label in spans]
    goodput = as_number(report.get("goodput"))
    kept = "" if goodput is None else f"; {goodput:.1%} of the time of ranks was not lost"
    spent = ", ".join(f"{span_text(seconds)} {label}" for seconds, label in amounts if seconds >= 0.05)
    head = ["", "began", "time", "steps", "trained again by the next", "exit code"]
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


_NUMERIC = {"parameters", "share", "frozen", "step", "size", "value", "exit code"}


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
