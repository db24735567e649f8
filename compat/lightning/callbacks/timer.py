"""``lightning.pytorch.callbacks.timer``."""

from __future__ import annotations

from ....callbacks.timer import Timer

__all__ = ["Timer"]
