"""``phalanx.registry``: the names of strategies, precisions, callbacks and loggers, to which others may be added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.core.registry import (
        CALLBACKS as CALLBACKS,
        LOGGERS as LOGGERS,
        PRECISIONS as PRECISIONS,
        STRATEGIES as STRATEGIES,
        Registry as Registry,
    )

_HOMES = {
    ".framework.core.registry": "CALLBACKS LOGGERS PRECISIONS Registry STRATEGIES",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
