"""Saves that a program calls for: ``save_checkpoint`` after a fit, and ``save_pretrained`` at any time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..checkpoint.manifest import AVERAGES, MODEL
from ..core.errors import ConfigurationError
from ..pretrained import save_folder, save_held
from ..resume.capture import live_weights
from ..watchdog import watched

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ..pretrained.saving import FolderOrder
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
    with _with_all_ranks(session):
        ended.save(path, weights_only)


def write_pretrained(session: Session, order: FolderOrder) -> Path:
    """Write the model of the run in progress, of the last fit, or of the last module; return the folder. Collective.

    Raises:
        ConfigurationError: there is no such model or average, or this process does not hold the weights.
        StorageError: the folder cannot be written.
    """
    run, ended = session.run, session.records.ended_fit
    if run is not None:
        run.check_together("save_pretrained")
        sections = {MODEL: live_weights(run), AVERAGES: run.averages.shards()}
        folder: Path = save_folder(run.world, run.module, sections, not run.traits.replicates, order)
        return folder
    if ended is not None and ended.is_usable:
        with _with_all_ranks(session):
            return ended.save_pretrained(order)
    if session.module is None:
        raise ConfigurationError("save_pretrained writes a module that was fitted or evaluated: call fit first.")
    if session.view.is_global_zero:
        save_held(session.module, order)
    return order.directory


@contextmanager
def _with_all_ranks(session: Session) -> Generator[None, None, None]:
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
