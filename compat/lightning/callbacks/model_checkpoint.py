"""``lightning.pytorch.callbacks.model_checkpoint``."""

from __future__ import annotations

from ....callbacks.model_checkpoint import ModelCheckpoint

__all__ = ["ModelCheckpoint"]
