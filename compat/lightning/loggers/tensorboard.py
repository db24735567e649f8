"""``lightning.pytorch.loggers.tensorboard``."""

from __future__ import annotations

from ....loggers.tensorboard import TensorBoardLogger

__all__ = ["TensorBoardLogger"]
