"""``lightning.pytorch.callbacks.callback``."""

from __future__ import annotations

from ....framework.api.callback import Callback

__all__ = ["Callback"]
