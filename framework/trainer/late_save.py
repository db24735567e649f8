"""``save_ended_fit``: a checkpoint of a fit that has ended."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..watchdog import watched

if TYPE_CHECKING:
    from collections.abc import Generator
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
    with with_all_ranks(session):
        ended.save(path, weights_only)


@contextmanager
def with_all_ranks(session: Session) -> Generator[None, None, None]:
    """Context of a save between two stages, in which all ranks take part."""
    world = session.fabric.world
    try:
        # A rank that calls it alone would wait for the others forever.
        with (
            watched(session.heartbeat, session.fabric.resources.place, session.settings.stall_limits),
            session.heartbeat.section("save"),
        ):
            yield
    finally:
        world.close()
