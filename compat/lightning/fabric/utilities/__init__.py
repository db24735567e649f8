"""``lightning.fabric.utilities``: the functions that programs import from there."""

from __future__ import annotations

from ...utilities import (
    AttributeDict,
    measure_flops,
    move_data_to_device,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from . import rank_zero, seed, types

__all__ = [
    "AttributeDict",
    "measure_flops",
    "move_data_to_device",
    "rank_zero",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed",
    "types",
]
