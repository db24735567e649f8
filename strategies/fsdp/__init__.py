"""Sharding with torch's ``fully_shard``, optionally combined with tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.lazy_exports import on_call

if TYPE_CHECKING:
    from .strategy import SplitReplicas as SplitReplicas

__getattr__ = on_call(__name__, {".strategy": "SplitReplicas"})
