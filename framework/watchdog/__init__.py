"""Detection of ranks that make no progress: heartbeats, limits, stack dumps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .in_process_watchdog import watched as watched

__getattr__ = on_call(__name__, {".in_process_watchdog": "watched"})
