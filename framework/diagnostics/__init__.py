"""Non-finite losses and gradients, loss spikes, and collectives that differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .collective_trace import comparing_collectives as comparing_collectives

__getattr__ = on_call(__name__, {".collective_trace": "comparing_collectives"})
