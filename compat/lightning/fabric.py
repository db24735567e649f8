"""``lightning.fabric``: Fabric, and the function that seeds all generators."""

from __future__ import annotations

from ...framework.distributed.seed import seed_everything
from ...framework.fabric.fabric import Fabric

__all__ = ["Fabric", "seed_everything"]
