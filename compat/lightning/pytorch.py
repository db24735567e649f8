"""``lightning.pytorch``, which is phalanx.compat.lightning itself: the import says what to use instead."""

from __future__ import annotations

from .absent import refuse

refuse(__name__)
