"""Whether a process is rank 0, and the rank that functions of ``lightning_utilities`` for rank 0 alone read."""

from __future__ import annotations

import sys

from torch import distributed

from ..system.environment import library_variable


def set_rank_zero_functions(rank: int) -> None:
    """Set the rank for ``rank_zero_only`` and its relatives in ``lightning_utilities``, if a program has imported them.

    A process that is forked as a rank has inherited the rank of its parent.
    """
    decorator = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    if decorator is not None:
        decorator.rank = rank


def is_rank_zero() -> bool:
    """Whether this process is rank 0 of its process group, or by its launcher's variables if there is no group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(library_variable("RANK") or 0) == 0
