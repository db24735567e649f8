"""Non-finite losses and gradients, loss spikes, and collectives that differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .batch_dump import keep_batch as keep_batch
    from .collective_trace import comparing_collectives as comparing_collectives

_HOMES = {
    "comparing_collectives": ".collective_trace",
    "keep_batch": ".batch_dump",
}

__getattr__ = on_call(__name__, _HOMES)
