"""``lightning.pytorch.callbacks.lr_monitor``."""

from __future__ import annotations

from ....callbacks.learning_rate import LearningRateMonitor

__all__ = ["LearningRateMonitor"]
