"""``lightning.pytorch.trainer``: the Trainer, and the function that seeds all generators."""

from __future__ import annotations

from ...framework.distributed.seed import seed_everything
from ...framework.trainer.trainer import Trainer

__all__ = ["Trainer", "seed_everything"]
