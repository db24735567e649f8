"""``lightning.pytorch.loggers.logger``."""

from __future__ import annotations

from ....framework.metrics.logger import Logger

__all__ = ["Logger"]
