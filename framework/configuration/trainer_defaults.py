"""Defaults of the Trainer's arguments that a program gives, which may be objects that no configuration describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

_PLAIN = (bool, int, float, str, PurePath, type(None))


def plain_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that a configuration can describe; callbacks are additions."""
    return {name: value for name, value in given.items() if name != "callbacks" and _is_plain(value)}


def object_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other defaults: objects, such as loggers or a strategy, and lists of them."""
    return {name: value for name, value in given.items() if name != "callbacks" and not _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def as_list(given: Any) -> list[Any]:
    """Return an argument that may be one object, several, or None as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
