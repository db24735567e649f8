"""stub"""
from __future__ import annotations
from typing import Any
def render_page(document: dict[str, Any]) -> str:
    """Return."""
    return "<!doctype html>"
