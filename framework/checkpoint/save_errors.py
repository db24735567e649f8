"""Exchange of each rank's outcome of a save, so that all ranks raise the same error or none raises.

Failures are sent as a kind and a message, not as exceptions, since an exception of any library may not be picklable.
"""

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


def outcome_of(failure: Exception | None, path: Path) -> Outcome:
    """Describe a failure that occurred while ``path`` was written; None for None."""
    if failure is None:
        return None
    if isinstance(failure, OSError) and not isinstance(failure, PhalanxError):
        failure = storage_error("writing", path, failure)
    for name, kind in _KINDS.items():
        if isinstance(failure, kind):
            return name, str(failure)
    return StorageError.__name__, f"{type(failure).__name__}: {failure}"


def error_of(outcomes: Sequence[Outcome], what: str, size: int) -> PhalanxError | None:
    """Return the error that all ranks raise, that of the first rank that failed; None if no rank failed.

    Args:
        outcomes: the outcome of each rank, in order.
        what: the beginning of the message.
        size: the number of ranks; the message names the rank if there are several.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            kind, message = outcome
            if kind == NonFiniteError.__name__:
                return NonFiniteError(message)
            where = f"rank {rank}: " if size > 1 else ""
            return _KINDS[kind](f"{what}: {where}{message}")
    return None


def gather_or_raise(world: World, failure: Exception | None, path: Path, what: str, payload: Any = None) -> list[Any]:
    """Gather each rank's payload; raise on all ranks if one failed. Collective.

    Args:
        world: the ranks.
        failure: the failure of this rank, if any.
        path: the file or directory that was being written.
        what: the beginning of the message.
        payload: the object of this rank, which must be picklable.

    Returns:
        The payloads of all ranks, in order.

    Raises:
        PhalanxError: the error of the first rank that failed.
    """
    gathered = world.all_gather_object((outcome_of(failure, path), payload))
    error = error_of([outcome for outcome, _ in gathered], what, world.size)
    if error is not None:
        raise error from failure
    return [payload for _, payload in gathered]
