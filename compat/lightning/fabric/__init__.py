"""``lightning.fabric``: Fabric, and the function that seeds all generators."""

from __future__ import annotations

from ....framework.distributed.seed import seed_everything
from ....framework.fabric.fabric import Fabric
from . import loggers, strategies, utilities, wrappers
from .wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped", "loggers", "seed_everything", "strategies", "utilities", "wrappers"]
