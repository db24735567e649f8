"""The results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..table import table
from .cells import ALL_SIDES, SETTINGS, SIDES, size_of
from .cohort import Record
from .measures import (
    NOMINAL_FLOPS,
    added_microseconds,
    model_flops_utilization,
    speed_ratio,
    spread,
    tokens_per_second,
)
from .results import Results, bars, median, waits_of

_ABSENT = "-"
_SPEED_HEAD = [
    *("", "tokens/s", "speed of", "ratio", "MFU of 989, %", "MFU of measured, %", "peak GB"),
    *("idle, %", "waits a step", "host µs", "rounds differ by, %"),
]
_HOST_HEAD = ["", "µs a step", "over", "µs over it", "µs over raw", "host µs, idle device", "rounds differ by, %"]


def markdown(results: Results, tiny: bool) -> str:
    """Return all tables. ``tiny``: the model was not of the sizes that are named."""
    parts = [_machine(results), _bars(results)]
    for size in ("350m", "1.3b"):
        for compiled in (False, True):
            title = f"GPT {size}, bf16, {'compiled blocks' if compiled else 'not compiled'}"
            parts.append(_speeds(results, title, results.of(size, compiled, list(SIDES)), tiny))
    settings = results.of("settings", False, ["raw", "phalanx zero2", "phalanx zero3", *SETTINGS])
    parts.append(_speeds(results, "Settings of DeepSpeed, GPT 350m, bf16", settings, tiny))
    parts += [_hosts(results), *_data(results), _saves(results), *_problems(results)]
    return "\n".join(part for part in parts if part) + "\n"


def _machine(results: Results) -> str:
    found = results.machine
    names = [f"{name} {found[name]}" for name in ("name", "torch", "cuda", "python") if found.get(name)]
    speeds = [
        f"{title} {found[name] / scale:.{digits}f} {unit}"
        for name, title, scale, digits, unit in (
            ("matmul_flops", "bf16 product of matrices", 1e12, 0, "TFLOP/s"),
            ("copy_bytes", "copy on the device", 1e12, 2, "TB/s"),
            ("pinned_bytes", "copy from pinned memory", 1e9, 1, "GB/s"),
            ("pageable_bytes", "from pageable memory", 1e9, 1, "GB/s"),
        )
        if found.get(name)
    ]
    return ", ".join(names) + (f". Measured: {', '.join(speeds)}." if speeds else "")


def _bars(results: Results) -> str:
    words = {True: "pass", False: "FAIL", None: "not judged"}
    rows = [
        [bar.title, _number(bar.value, 3), f"{'>=' if bar.is_minimum else '<='} {bar.limit:g}", words[bar.passes]]
        for bar in bars(results)
    ]
    return table("Bars", ["", "measured", "bar", ""], rows) if rows else ""


def _speeds(results: Results, title: str, records: Sequence[Record], tiny: bool) -> str:
    rows = [_speed_row(results, record, tiny) for record in records if record.seconds]
    return table(title, _SPEED_HEAD, rows) if rows else ""


def _speed_row(results: Results, record: Record, tiny: bool) -> list[object]:
    size = size_of("350m" if record.size == "settings" else record.size, tiny)
    speed = tokens_per_second(size.tokens, record.seconds)
    peaks = (NOMINAL_FLOPS, results.machine.get("matmul_flops"))
    used = [100 * model_flops_utilization(size.elements, speed, peak) if peak else None for peak in peaks]
    reference = results.reference(record)
    profile = record.profile or {}
    idle = profile.get("idle_share")
    return [
        record.side,
        f"{speed:.0f}",
        ALL_SIDES[record.side].reference,
        _number(speed_ratio(reference.seconds, record.seconds) if reference else None, 3),
        *(_number(share) for share in used),
        _number(None if record.peak_bytes is None else record.peak_bytes / 1e9),
        _number(None if idle is None else 100 * idle),
        _number(waits_of(record)),
        _number(median(record.host_us), 0),
        100 * spread(record.seconds),
    ]


def _hosts(results: Results) -> str:
    rows: list[list[object]] = []
    for record in results.of("small", False, list(SIDES)):
        if record.seconds:
            reference, raw = results.reference(record), results.beside(record, "raw")
            rows.append(
                [
                    record.side,
                    _number(median(record.seconds, lambda seconds: seconds * 1e6)),
                    ALL_SIDES[record.side].reference,
                    *(
                        _number(added_microseconds(other.seconds, record.seconds) if other else None)
                        for other in (reference, raw)
                    ),
                    _number(median(record.host_us)),
                    100 * spread(record.seconds),
                ]
            )
    return table("A model that is bound by launches", _HOST_HEAD, rows) if rows else ""


def _data(results: Results) -> Iterator[str]:
    titles = {"copies": "Batches of images", "slow loader": "A loader as slow as the device"}
    for group, title in titles.items():
        rows = [
            [case["title"], _number(median(case["seconds"], lambda seconds: seconds * 1e3), 2), case["problem"]]
            for case in results.data
            if case["group"] == group
        ]
        if rows:
            yield table(title, ["", "ms a micro-batch", ""], rows)


def _saves(results: Results) -> str:
    fields = (("step_ms", 1), ("stall_ms", 0), ("longest_ms", 0), ("until_written", 1), ("gigabytes", 3))
    rows = [
        [save["way"], *(_number(save.get(name), digits) for name, digits in fields), save["problem"]]
        for save in results.saves
    ]
    head = ["", "ms a step", "stall, ms", "longest step, ms more", "s until written", "GB of state", ""]
    return table("A save during training", head, rows) if rows else ""


def _problems(results: Results) -> Iterator[str]:
    lines = [
        f"- {record.size}{' compiled' if record.compiled else ''}, {record.side}: {record.problem}"
        for record in results.records
        if record.problem
    ]
    lines += [f"- {problem}" for problem in results.problems]
    if lines:
        yield "\n### Not measured\n"
        yield "\n".join(lines)


def _number(value: Any, digits: int = 1) -> str:
    return _ABSENT if value is None else f"{value:.{digits}f}"
