"""Values of documents that other programs may have changed: each function returns a value of one type."""

from __future__ import annotations

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
