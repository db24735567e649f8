"""``phalanx.registry``: the names of strategies, precisions, callbacks and loggers, to which others may be added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.core.registry import CALLBACKS as CALLBACKS
    from .framework.core.registry import LOGGERS as LOGGERS
    from .framework.core.registry import PRECISIONS as PRECISIONS
    from .framework.core.registry import STRATEGIES as STRATEGIES
    from .framework.core.registry import Registry as Registry

_HOMES = {
    "CALLBACKS": ".framework.core.registry",
    "LOGGERS": ".framework.core.registry",
    "PRECISIONS": ".framework.core.registry",
    "Registry": ".framework.core.registry",
    "STRATEGIES": ".framework.core.registry",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
