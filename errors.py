"""``phalanx.errors``: the exceptions that phalanx raises. ``PhalanxError`` is the base class of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.core.errors import (
        CheckpointError as CheckpointError,
        ConfigurationError as ConfigurationError,
        DataError as DataError,
        DesyncError as DesyncError,
        LoopError as LoopError,
        MetricError as MetricError,
        NonFiniteError as NonFiniteError,
        PhalanxError as PhalanxError,
        Preempted as Preempted,
        RankError as RankError,
        StalledError as StalledError,
        StorageError as StorageError,
        UnknownArgumentError as UnknownArgumentError,
        UnknownNameError as UnknownNameError,
    )

_HOMES = {
    ".framework.core.errors": "CheckpointError ConfigurationError DataError DesyncError LoopError MetricError "
    "NonFiniteError PhalanxError Preempted RankError StalledError StorageError UnknownArgumentError UnknownNameError"
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
