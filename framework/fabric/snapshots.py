"""``LoopSnapshots``: the part of a Fabric that keeps the state of a loop in memory that outlives its ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import newest_good
from ..checkpoint.snapshot_slots import AUTO, Slots, SnapshotInterval
from ..core.errors import ConfigurationError, StorageError, is_count
from ..core.intervals import Interval
from ..core.wording import a_type
from ..distributed.collective_errors import on_rank_zero
from ..launch import open_memory
from ..system.environment import error_dir
from ..watchdog.heartbeat import OUTSIDE, SECTIONS, Heartbeat, resolve_stall_timeout
from .checkpoints import Checkpoints
from .collectives import Ranks
from .prepared import Prepared

if TYPE_CHECKING:
    from ..checkpoint.node_folders import NodeFolders


class LoopSnapshots:
    """Takes snapshots of all objects of a loop, and restores the newest one in restarted ranks."""

    def __init__(self, ranks: Ranks, prepared: Prepared, checkpoints: Checkpoints) -> None:
        self._ranks, self._prepared, self._checkpoints = ranks, prepared, checkpoints
        self._is_open = False
        self._found: Path | None = None
        """The newest snapshot of earlier attempts."""
        self._nodes: NodeFolders | None = None
        self._slots: Slots | None = None
        self._interval: SnapshotInterval | None = None
        self._every: int | str = AUTO
        self._last_step = 0
        """The number of updates at the last call."""
        self._seconds = 0.0
        self._heartbeat = Heartbeat()

    def load(self, values: dict[str, Any] | None) -> bool:
        """Restore the newest snapshot of an earlier attempt; see ``Fabric.load_snapshot``. Collective."""
        _check_values("load_snapshot", values)
        self._open()
        if self._found is None:
            return False
        self._checkpoints.load_state(self._found, {} if values is None else values)
        self._last_step = self._prepared.updates
        self._mark()
        return True

    def take(self, values: Mapping[str, Any] | None, every: int | str) -> bool:
        """Take a snapshot if one is due; see ``Fabric.snapshot``. Collective."""
        began, step = time.perf_counter(), self._prepared.updates
        if self._interval is None or every != self._every:
            _check_values("snapshot", values)
            steps = _checked_interval(every)
            self._open()
            self._interval, self._every = SnapshotInterval(steps, self._last_step), every
        self._mark()
        # A snapshot within a window of micro-batches would lose the gradients that are accumulated.
        is_after_update, self._last_step = step > self._last_step, step
        if self._slots is None or not is_after_update or step < self._interval.due:
            return False
        interval, world = self._interval, self._ranks.world
        interval.begin(step, began, self._seconds, world)
        path, nodes = self._slots.next(), self._nodes
        assert nodes is not None
        if nodes.leads:
            shutil.rmtree(path, ignore_errors=True)
        try:
            self._checkpoints.save_state(path, values or {}, nodes=nodes)
        except StorageError as error:
            interval.stop()
            if world.is_global_zero:
                _say(f"No more snapshots are taken, and restarts begin from the last one: {error}")
            return False
        self._seconds = time.perf_counter() - began
        interval.end(step)
        return True

    def clear(self) -> None:
        """Forget what was found; the next call looks for the memory of the launch again."""
        self._is_open, self._nodes, self._found, self._slots, self._interval = False, None, None, None, None
        self._last_step, self._seconds = 0, 0.0

    def _open(self) -> None:
        """Find the memory of the launch. Collective."""
        if self._is_open:
            return
        self._is_open, records, world = True, error_dir(), self._ranks.world
        nodes = None if records is None else open_memory(world, _say, is_loop=True)
        if nodes is None or records is None or not nodes.serves_restarts:
            return
        self._nodes = nodes
        found = on_rank_zero(world, lambda: newest_good([nodes.folder], _say)) if nodes.is_usable else None
        # Other nodes have it in memory of their own.
        self._found = None if found is None else nodes.folder / found.name
        # The newest one is replaced last, also in a loop that does not restore it.
        self._slots = Slots(nodes.folder, self._found)
        if self._heartbeat.share(records, world.rank):
            # The loop is the user's own, which has no time limits.
            self._heartbeat.begin(resolve_stall_timeout(False))
            self._heartbeat.enter(SECTIONS[OUTSIDE])

    def _mark(self) -> None:
        """Record the progress of this rank: ranks that fail twice at one step are not restarted."""
        self._heartbeat.set_position(self._prepared.updates, -1, -1)


def _say(text: str) -> None:
    print(f"phalanx: {text}", flush=True)


def _check_values(method: str, values: object) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise ConfigurationError(
            f"{method} was given {a_type(values)}: give a dict of plain values; what is set up is saved without it."
        )


def _checked_interval(every: object) -> int | str:
    """Return the number of updates between two snapshots, ``"auto"``, or the text of a time."""
    if every == AUTO:
        return AUTO
    if not isinstance(every, str) and not is_count(every, 1):
        raise ConfigurationError(f"snapshot(every={every!r}) must be a number of updates from 1 on, or 'auto'.")
    found = Interval.parse(every, owner="snapshot", units=("steps", "seconds"))
    return int(found.number) if found.unit == "steps" else str(every)
