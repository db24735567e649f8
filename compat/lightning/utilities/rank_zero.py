"""``lightning.pytorch.utilities.rank_zero``: functions that act on rank 0 alone, those of ``lightning_utilities``.

They read the rank from ``rank_zero_only.rank``. It is set here for code that runs before any Trainer or Fabric, and by
``World`` in each rank.
"""

from __future__ import annotations

from lightning_utilities.core.rank_zero import (
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)

from ....framework.distributed.rank_zero import set_rank_zero_functions
from ....framework.distributed.world import placement

__all__ = [
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

set_rank_zero_functions(placement().rank)
