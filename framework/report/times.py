"""Times, spans and numbers as text."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from itertools import pairwise


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as a time in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def span_text(seconds: float) -> str:
    """Return a human-readable time span with one or two units: ``"2 h 4 min"``, ``"41 s"``, ``"0.3 s"``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.05 else "0 s"
    whole = round(seconds)
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    for (unit, length), (below, smaller) in pairwise(units):
        if whole >= length:
            rest = (whole % length) // smaller
            return f"{whole // length} {unit}" + (f" {rest} {below}" if rest else "")
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
