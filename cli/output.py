"""Output of the command: text for the console, with control characters escaped, and JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..framework.core.wording import counted
from ..framework.system.console import encodable


def printable(text: str) -> str:
    """Return text in which control characters, changes of writing direction and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def say(text: str = "") -> None:
    """Print one line."""
    print(encodable(printable(text), sys.stdout))


def say_json(value: Any) -> None:
    """Print a value as JSON: ASCII, so no character in it acts on a terminal."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    # Importing dataclasses would take a third of the time of ``phalanx --help``.
    if not isinstance(value, type) and (fields := getattr(value, "__dataclass_fields__", None)) is not None:
        return {name: getattr(value, name) for name in fields}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def size(count: int) -> str:
    """Return a human-readable number of bytes: ``"1.5 GB"``."""
    value, units = float(count), ["B", "KB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


def age(seconds: float) -> str:
    """Return a human-readable time span: ``"3 h"``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def moment(seconds: float) -> str:
    """Return seconds since 1970 as a date and time, UTC."""
    # Times far in the future have a year of five digits, which datetime does not support.
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(seconds, 253_402_300_799)))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header, columns aligned."""
    lines = [list(map(printable, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


_MAX_LINES = 20
_KINDS = {
    "trainer": "a Trainer's, to resume from",
    "weights": "a Trainer's weights alone",
    "fabric": "Fabric's",
    "other": "of another program",
}


def show_inspection(found: Any) -> None:
    """Print what ``inspect`` returned."""
    say(found.path)
    ranks = f"{counted(found.world_size, 'rank')}, {'sharded' if found.sharded else 'written by rank 0'}"
    way = [part for part in (found.strategy, found.precision, ranks) if part]
    _line("saved", f"{moment(found.saved_at)} by phalanx {found.phalanx}, format {found.format_version}")
    _line("kind", _KINDS.get(found.kind, found.kind))
    _line("strategy", ", ".join(way))
    if found.module:
        _line("module", found.module)
    counters = (("epoch", found.epoch), ("batch", found.batch), ("step", found.step))
    if reached := [f"{name} {value}" for name, value in counters if value is not None]:
        _line("progress", ", ".join(reached))
    _line("weights", "all finite" if found.finite else f"{found.nonfinite!r} is not finite")
    for name, section in found.sections.items():
        tied = f" ({section.tied} tied to others)" if section.tied else ""
        kinds = ", ".join(f"{code} {size(count)}" for code, count in section.bytes_by_dtype.items())
        what = f"{counted(section.tensors, 'tensor')}{tied}, {counted(section.elements, 'element')}"
        _line(name, f"{what}, {size(section.bytes)}{f': {kinds}' if kinds else ''}")
        if section.left_out:
            _line("left out", left_out_text(section))
    for index, optimizer in enumerate(found.optimizers):
        for number, group in enumerate(optimizer.groups):
            hyper = {key: value for key, value in group.items() if key != "parameters"}
            where = f"optimizer {index}, group {number}"
            _line(where, f"{optimizer.kind}, {counted(group['parameters'], 'parameter')}: {_pairs(hyper)}")
    for title, values in (("hparams", found.hparams), ("metrics", found.metrics)):
        if values:
            _line(title, _pairs(values))
    if found.unsaved_hparams:
        _line("not saved", ", ".join(found.unsaved_hparams))
    for name, count in found.files.items():
        _line("file", f"{name}, {size(count)}")


def left_out_text(section: Any) -> str:
    """Return the number of weights that a checkpoint leaves out, and where they are."""
    what = f"{counted(section.left_out, 'frozen tensor')} of {counted(section.left_out_elements, 'element')}"
    return f"{what}: the base that the module is built with, known by a fingerprint of each"


def show_difference(found: Any) -> None:
    """Print what ``diff`` returned."""
    if found.equal:
        tensors = sum(section.same for section in found.sections.values())
        say(f"equal: {counted(tensors, 'tensor')}, and everything else")
        return
    for name, section in found.sections.items():
        say(f"{name}: {counted(section.same, 'tensor')} equal")
        _some("only in the first", section.only_in_first)
        _some("only in the second", section.only_in_second)
        _some("another shape", [f"{key}: {a} and {b}" for key, (a, b) in section.shapes.items()])
        _some("another dtype", [f"{key}: {a} and {b}" for key, (a, b) in section.dtypes.items()])
        _some("other values", [_values(key, value) for key, value in section.values.items()])
        _some("other values, left out", section.fingerprints)
    if found.documents:
        say("other values:")
    _some("differs", [f"{path}: {a} and {b}" for path, a, b in found.documents])


def _values(name: str, found: Any) -> str:
    return f"{name}: {found.different:,} of {counted(found.elements, 'element')}, by up to {found.max_abs:.6g}"


def _some(what: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    for line in lines[:_MAX_LINES]:
        say(f"  {what}: {line}")
    if len(lines) > _MAX_LINES:
        say(f"  {what}: {len(lines) - _MAX_LINES:,} more, all of them with --json")


def _line(title: str, text: str) -> None:
    say(f"  {title:<10} {text}")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict) and value.get("$") in ("tuple", "float", "scalar", "numpy", "dtype", "path"):
        value = value.get("items", value.get("value"))
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
