"""``lightning.pytorch.callbacks.early_stopping``."""

from __future__ import annotations

from ....callbacks.early_stopping import EarlyStopping

__all__ = ["EarlyStopping"]
