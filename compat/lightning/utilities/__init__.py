"""``lightning.pytorch.utilities``: the functions and types that programs import from there."""

from __future__ import annotations

from ....framework.core.hyperparameters import AttributeDict
from ....framework.data.combined_loader import CombinedLoader
from ....framework.fabric.collectives import to_device as move_data_to_device
from .flops import measure_flops
from .grads import grad_norm
from .rank_zero import rank_zero_debug, rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "grad_norm",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]
