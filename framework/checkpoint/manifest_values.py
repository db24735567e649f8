"""Checks of the values in a manifest, each of which has exactly one JSON type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

MAX_VALUE = 1 << 62
_MAX_DIMS = 64

T = TypeVar("T")


def natural(value: Any) -> int:
    """Return a count, from 0 to 2^62."""
    if type(value) is not int or not 0 <= value <= MAX_VALUE:
        raise ValueError(f"{value!r} is not a count")
    return value


def seconds(value: Any) -> float:
    """Return a time in seconds since 1970."""
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ValueError(f"{value!r} is not a time in seconds since 1970")
    return float(value)


def extent(value: Any) -> tuple[int, ...]:
    """Return the sizes or offsets of at most 64 dims."""
    if len(typed(list, value)) > _MAX_DIMS:
        raise ValueError(f"{len(value)} dims are more than {_MAX_DIMS}")
    return tuple(map(natural, value))


def matching(pattern: re.Pattern[str], value: Any) -> str:
    """Return a string that matches a pattern."""
    if pattern.fullmatch(typed(str, value)) is None:
        raise ValueError(f"{value!r} is not of the form {pattern.pattern}")
    return str(value)


def typed(kind: Callable[..., T], value: Any) -> T:
    """Return a value of exactly the class ``kind``."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} where a {getattr(kind, '__name__', kind)} belongs")
    return value  # type: ignore[no-any-return]
