"""``lightning.pytorch.callbacks.progress``."""

from __future__ import annotations

from ....callbacks.progress import ProgressBar
from ....callbacks.progress_variants import RichProgressBar, TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]
