"""``lightning.pytorch.utilities.combined_loader``."""

from __future__ import annotations

from ....framework.data.combined_loader import CombinedLoader

__all__ = ["CombinedLoader"]
