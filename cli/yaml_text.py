"""``yaml_text``: nested dicts and lists as YAML, without a library for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Text that no reader of YAML takes for a number, a boolean, a date or syntax.
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def yaml_text(value: dict[str, Any]) -> str:
    """Return a mapping as a document of YAML; its leaves are texts, integers, and empty mappings or lists."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _entry(f"{_scalar(key)}:", item, "  ")
    else:
        for item in value:
            if isinstance(item, (dict, list)) and item:
                first, *rest = _lines(item)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_scalar(item)}"


def _entry(head: str, item: Any, indent: str) -> Iterator[str]:
    if isinstance(item, (dict, list)) and item:
        yield head
        yield from (f"{indent}{line}" for line in _lines(item))
    else:
        yield f"{head} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    # JSON is YAML too.
    return json.dumps(value)
