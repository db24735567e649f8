"""``phalanx.errors``: the exceptions that phalanx raises. ``PhalanxError`` is the base class of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.core.errors import CheckpointError as CheckpointError
    from .framework.core.errors import ConfigurationError as ConfigurationError
    from .framework.core.errors import DataError as DataError
    from .framework.core.errors import DesyncError as DesyncError
    from .framework.core.errors import LoopError as LoopError
    from .framework.core.errors import MetricError as MetricError
    from .framework.core.errors import NonFiniteError as NonFiniteError
    from .framework.core.errors import PhalanxError as PhalanxError
    from .framework.core.errors import Preempted as Preempted
    from .framework.core.errors import RankError as RankError
    from .framework.core.errors import StalledError as StalledError
    from .framework.core.errors import StorageError as StorageError
    from .framework.core.errors import UnknownNameError as UnknownNameError

_HOMES = {
    "CheckpointError": ".framework.core.errors",
    "ConfigurationError": ".framework.core.errors",
    "DataError": ".framework.core.errors",
    "DesyncError": ".framework.core.errors",
    "LoopError": ".framework.core.errors",
    "MetricError": ".framework.core.errors",
    "NonFiniteError": ".framework.core.errors",
    "PhalanxError": ".framework.core.errors",
    "Preempted": ".framework.core.errors",
    "RankError": ".framework.core.errors",
    "StalledError": ".framework.core.errors",
    "StorageError": ".framework.core.errors",
    "UnknownNameError": ".framework.core.errors",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
