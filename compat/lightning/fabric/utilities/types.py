"""``lightning.fabric.utilities.types``: types for annotations and ``isinstance``."""

from __future__ import annotations

from torch.distributed import ReduceOp
from torch.optim import Optimizer as Optimizable

__all__ = ["Optimizable", "ReduceOp"]
