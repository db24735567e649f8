"""``lightning.pytorch.callbacks.progress``."""

from __future__ import annotations

from ....callbacks.progress import ProgressBar, RichProgressBar, TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]
