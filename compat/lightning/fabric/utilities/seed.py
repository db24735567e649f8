"""``lightning.fabric.utilities.seed``."""

from __future__ import annotations

from .....framework.distributed.seed import seed_everything

__all__ = ["seed_everything"]
