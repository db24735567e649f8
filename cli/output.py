"""Output of the command: text with control characters escaped, human-readable sizes and ages, and JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any


def printable(text: str) -> str:
    """Return text in which control characters, changes of writing direction and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def say(text: str = "") -> None:
    """Print one line."""
    print(printable(text))


def say_json(value: Any) -> None:
    """Print a value as JSON: ASCII, so no character in it acts on a terminal."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
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


def counted(number: int, what: str) -> str:
    """Return a number with its unit in singular or plural."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


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
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
