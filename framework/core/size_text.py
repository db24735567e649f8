"""Numbers of bytes in messages."""

from __future__ import annotations

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(number: int) -> str:
    """Return a number of bytes with two or three significant digits: ``0``, ``999 B``, ``1.2 MB``."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    text = f"{value:.0f}" if not unit or value >= 99.95 else f"{value:.1f}"
    return f"{text} {_UNITS[unit]}" if number else "0"
