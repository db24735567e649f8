"""The start of a Trainer's ranks by running the program's script again."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..data.accumulation_window import RepeatableWindows
from ..diagnostics.out_of_memory import is_out_of_memory
from ..launch import launch_script
from ..launch.restart_policy import memory_of, record_smaller_micro_batch
from ..system.entry_script import can_rerun_script
from ..system.environment import error_dir

if TYPE_CHECKING:
    from ..parallel.resources import Resources
    from .resolved_settings import Settings
    from .session import Session


def start_script_ranks(session: Session, writes: bool) -> None:
    """Start the ranks if they are not running and there is a script: this process then only supervises them.

    The ranks reach this line by running the script, and return.

    Args:
        session: the state of the Trainer.
        writes: whether the run writes files.
    """
    resources, given = session.fabric.resources, session.settings.given
    place, snapshots = resources.place, bool(given.snapshots) or finds_by_restarts(session.settings, resources)
    # A process that outlives it is needed for a single rank too.
    is_watched = (bool(given.max_restarts) or snapshots) and place.launcher is None and place.size == 1
    if (resources.must_launch or is_watched) and can_rerun_script():
        launch_script(resources.world_size, given.max_restarts, writes, resources.libraries, snapshots=snapshots)


def finds_by_restarts(settings: Settings, resources: Resources) -> bool:
    """Whether a fit with ``micro_batch_size="auto"`` restarts its ranks when one of them runs out of memory.

    It does under a strategy that cannot repeat a window, in a script whose ranks phalanx starts on one node.
    """
    found, place = settings.global_batch, resources.place
    is_needed = found is not None and found.is_found and resources.strategy.recovery is None
    if not is_needed or settings.given.snapshots is False or resources.num_nodes > 1:
        return False
    return place.launcher == "phalanx" or (place.launcher is None and can_rerun_script())


def restarts_exhausted(session: Session) -> bool:
    """Whether the launcher of this rank starts it again with smaller micro-batches if memory is short."""
    if session.fabric.resources.num_nodes > 1 or session.settings.given.snapshots is False:
        return False
    records = error_dir()
    return records is not None and memory_of(records) is not None


def note_exhausted(session: Session, error: BaseException) -> None:
    """If this rank ran out of memory, record smaller micro-batches for the next attempt. Not collective."""
    loop, records = session.loop, error_dir()
    if records is None or loop is None or not is_out_of_memory(error) or not restarts_exhausted(session):
        return
    if isinstance(loop.windows, RepeatableWindows) and (size := loop.windows.micro_batch_size) > 1:
        with suppress(OSError):
            record_smaller_micro_batch(records, size // 2)
