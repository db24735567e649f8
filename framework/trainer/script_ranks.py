"""The start of a Trainer's ranks by running the program's script again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..launch import launch_script
from ..system.entry_script import can_rerun_script

if TYPE_CHECKING:
    from .session import Session


def start_script_ranks(session: Session, writes: bool) -> None:
    """Start the ranks if they are not running and there is a script: this process then only supervises them.

    The ranks reach this line by running the script, and return.

    Args:
        session: the state of the Trainer.
        writes: whether the run writes files.
    """
    resources, given = session.fabric.resources, session.settings.given
    place, snapshots = resources.place, bool(given.snapshots)
    # A process that outlives it is needed for a single rank too.
    is_watched = (bool(given.max_restarts) or snapshots) and place.launcher is None and place.size == 1
    if (resources.must_launch or is_watched) and can_rerun_script():
        launch_script(resources.world_size, given.max_restarts, writes, resources.libraries, snapshots=snapshots)
