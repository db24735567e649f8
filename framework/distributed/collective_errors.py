"""Run a local function on every rank, or on rank 0 alone; if it fails on any rank, raise on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ..core.errors import CheckpointError, PhalanxError, StorageError
from .world import World

T = TypeVar("T")


def on_all_ranks(world: World, function: Callable[[], T]) -> T:
    """Run a function without collectives on every rank; if it fails on any rank, raise on all. Collective.

    Raises:
        CheckpointError: an ``OSError`` on a rank: it could not read the checkpoint.
        PhalanxError: the error that the function raised on any rank.
    """
    result: T | None = None
    failure: PhalanxError | None = None
    try:
        result = function()
    except PhalanxError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"the checkpoint cannot be read: {error}.")
    failures = {rank: one for rank, one in enumerate(world.all_gather_object(failure)) if one is not None}
    if failure is not None and len(failures) == world.size:
        raise failure
    for rank, one in failures.items():
        raise type(one)(f"rank {rank} of {world.size}: {one}") from failure
    return cast(T, result)


def on_rank_zero(world: World, function: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result, or raise its error, on all ranks. Collective.

    Raises:
        StorageError: an ``OSError`` on rank 0.
        PhalanxError: the error that the function raised.
    """
    outcome: tuple[T | None, PhalanxError | None] = (None, None)
    if world.is_global_zero:
        try:
            outcome = (function(), None)
        except PhalanxError as error:
            outcome = (None, error)
        except OSError as error:
            outcome = (None, StorageError(f"rank 0 could not read or write: {error}."))
    result, failure = world.broadcast_object(outcome)
    if failure is not None:
        raise failure
    return cast(T, result)
