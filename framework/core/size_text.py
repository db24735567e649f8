"""Numbers of bytes in messages."""

from __future__ import annotations

import re
from math import ceil

from .errors import ConfigurationError

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_BINARY_UNITS = ("B", "KIB", "MIB", "GIB", "TIB", "PIB")
_FACTORS: dict[str, int] = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(_UNITS)},
    **{unit: 1024**power for power, unit in enumerate(_BINARY_UNITS)},
}


def size_text(number: int) -> str:
    """Return a number of bytes with two or three significant digits: ``0``, ``999 B``, ``1.2 MB``."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    text = f"{value:.0f}" if not unit or value >= 99.95 else f"{value:.1f}"
    return f"{text} {_UNITS[unit]}" if number else "0"


def size_in_bytes(given: int | str, name: str = "max_shard_size") -> int:
    """Return the bytes of a size such as ``5_000_000_000`` or ``"5GB"``, the value of the argument ``name``.

    Raises:
        ConfigurationError: the value is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(given))
    factor = _FACTORS.get(match[2].upper()) if match is not None else None
    size = 0.0 if match is None or factor is None else float(match[1]) * factor
    if size < 1:
        raise ConfigurationError(f"{name}={given!r} is not a size; give bytes, or a string such as '5GB'.")
    return ceil(size)
