"""Values of documents, which a reader takes from files of any content, and their text.

A value of another type than expected counts as missing.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any


def mapping(value: Any) -> dict[str, Any]:
    """Return a dict as it is; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """Return a list as it is; an empty one for anything else."""
    return value if isinstance(value, list) else []


def rows(value: Any) -> list[dict[str, Any]]:
    """Return the dicts in a list."""
    return [each for each in listed(value) if isinstance(each, dict)]


def text(value: Any) -> str:
    """Return a value as one text: dicts and lists as pairs and items."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name}={text(one)}" for name, one in value.items())
    return ", ".join(map(text, value)) if isinstance(value, list) else str(value)


def whole(value: Any) -> int | None:
    """Return a number without its fraction; None for anything else."""
    try:
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except (OverflowError, ValueError):
        return None


def as_number(value: Any) -> float | None:
    """Return a value as a float; None for what is not a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as a time in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def parsed_time(text: Any) -> float | None:
    """Return a time in ISO 8601 as seconds since 1970; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def span_text(seconds: float, num_units: int = 2) -> str:
    """Return a human-readable time span with at most so many units: ``"2 h 4 min"``, ``"41 s"``, ``"0.3 s"``.

    Args:
        seconds: the seconds.
        num_units: 2, or 1 for a rough one, such as ``"2 h"``.
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.05 else "0 s"
    whole = round(seconds)
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    for (unit, length), (below, smaller) in pairwise(units):
        if whole >= length:
            rest = (whole % length) // smaller
            return f"{whole // length} {unit}" + (f" {rest} {below}" if rest and num_units > 1 else "")
    return f"{whole} s"


def number_text(value: float | None) -> str:
    """Return a number with four significant digits, whole numbers with separators of thousands."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.4g}"
