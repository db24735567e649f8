"""Exchange of each rank's outcome of a save, so that all ranks raise the same error or none raises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..core.errors import ConfigurationError, NonFiniteError, PhalanxError, StorageError
from ..distributed.world import World
from ..system.atomic_files import storage_error

Outcome: TypeAlias = "tuple[str, str] | None"
"""A failure as it is sent to the other ranks: its kind and message. None for success."""

_KINDS: dict[str, type[PhalanxError]] = {
    kind.__name__: kind for kind in (ConfigurationError, NonFiniteError, StorageError)
}


def tell(failure: Exception | None, path: Path) -> Outcome:
    """Describe a failure that occurred while ``path`` was written."""
    if failure is None:
        return None
    if isinstance(failure, OSError) and not isinstance(failure, PhalanxError):
        failure = storage_error("writing", path, failure)
    for name, kind in _KINDS.items():
        if isinstance(failure, kind):
            return name, str(failure)
    return StorageError.__name__, f"{type(failure).__name__}: {failure}"


def error_of(told: Sequence[Outcome], what: str, size: int) -> PhalanxError | None:
    """Return the error that all ``size`` ranks raise, from the first rank that failed; ``what`` begins its message."""
    for rank, outcome in enumerate(told):
        if outcome is not None:
            kind, message = outcome
            if kind == NonFiniteError.__name__:
                return NonFiniteError(message)
            where = f"rank {rank}: " if size > 1 else ""
            return _KINDS[kind](f"{what}: {where}{message}")
    return None


def agree(world: World, failure: Exception | None, path: Path, what: str, payload: Any = None) -> list[Any]:
    """Gather each rank's payload; raise on all ranks if one failed. Collective.

    Raises:
        PhalanxError: the error of the first rank that failed.
    """
    gathered = world.all_gather_object((tell(failure, path), payload))
    error = error_of([told for told, _ in gathered], what, world.size)
    if error is not None:
        raise error from failure
    return [payload for _, payload in gathered]
