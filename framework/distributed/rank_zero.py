"""The rank that functions of ``lightning_utilities`` for rank 0 alone read."""

from __future__ import annotations

import sys


def set_rank_zero_functions(rank: int) -> None:
    """Set the rank for ``rank_zero_only`` and its relatives in ``lightning_utilities``, if a program has imported them.

    A process that is forked as a rank has inherited the rank of its parent.
    """
    decorator = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    if decorator is not None:
        decorator.rank = rank
