"""``save_ended_fit``: a checkpoint of a fit that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..watchdog import watched

if TYPE_CHECKING:
    from pathlib import Path

    from .session import Session


def save_ended_fit(session: Session, path: Path, weights_only: bool) -> None:
    """Save the state of the last fit at its end. Collective.

    Raises:
        ConfigurationError: there is no such state.
        NonFiniteError: on all ranks; a weight is NaN or infinite.
        StorageError: on all ranks; the checkpoint could not be written.
    """
    ended = session.records.ended_fit
    if ended is None:
        raise ConfigurationError(f"save_checkpoint({str(path)!r}): {session.records.no_fit}.")
    world = session.fabric.world
    try:
        # A rank that calls it alone would wait for the others forever.
        with (
            watched(session.heartbeat, session.fabric.resources.place, session.settings.stall_limits),
            session.heartbeat.section("save"),
        ):
            ended.save(path, weights_only)
    finally:
        world.close()
