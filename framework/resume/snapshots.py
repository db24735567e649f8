"""``Snapshots``: the state of a fit in memory that outlives its ranks, from which restarted ranks continue.

A snapshot is a checkpoint in a file system in memory: every strategy can save and load it, its tensors have checksums,
and it counts once its manifest is written. Two directories take turns, so that one is complete at any time. On several
nodes each has both, with its own part and a copy of its neighbour's (checkpoint/node_folders.py). The launchers'
processes remove them at their end.
"""

from __future__ import annotations

import math
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.save_request import SaveRequest
from ..checkpoint.snapshot_slots import Slots, SnapshotInterval

if TYPE_CHECKING:
    from ..checkpoint.deletion import BackgroundDeletion
    from ..checkpoint.node_folders import NodeFolders
    from ..core.errors import PhalanxError
    from ..run.run import Run


class NoSnapshots:
    """Takes no snapshots."""

    due = math.inf

    def take(self) -> None:
        """Not called: no step is due."""

    def end(self) -> None:
        """Nothing to remove."""


class Snapshots:
    """Takes snapshots of a fit at the ends of optimizer steps.

    Args:
        nodes: the directories of its snapshots.
        every: the number of optimizer steps between two, ``"auto"`` for at most 2 % of the time, or a time.
        kept: the snapshot from which the fit was resumed, which is replaced last; None if there is none.
    """

    def __init__(self, run: Run, nodes: NodeFolders, every: int | str, kept: Path | None) -> None:
        self._run = run
        self._nodes = nodes
        self._slots = Slots(nodes.folder, kept)
        self._interval = SnapshotInterval(every, run.progress.global_step)
        self._counts_threads = run.device_type == "cpu"
        self._seconds = self._thread_seconds = 0.0
        """The time that the newest snapshot took in the training thread, and in the thread that writes."""

    @property
    def due(self) -> float:
        """The optimizer step after which the next one is taken."""
        return self._interval.due

    def take(self) -> None:
        """Take a snapshot, which a thread writes. Collective.

        It is taken after a later step if the state is incomplete, or with ``"auto"`` while a save is in progress, which
        it would wait for.
        """
        run, interval, began = self._run, self._interval, time.perf_counter()
        if run.in_window or (interval.is_auto and run.saver.is_pending):
            return
        run.saver.finish()
        # The one before may have failed, and ``_done`` has stopped the others.
        if math.isinf(interval.due):
            return
        step = run.progress.global_step
        # On a CPU the thread takes its time from training.
        cost = self._seconds + (self._thread_seconds if self._counts_threads else 0.0)
        interval.begin(step, began, cost, run.world)
        path = self._slots.next()
        run.saver.save(
            SaveRequest(
                path,
                asynchronous=True,
                optional=True,
                nodes=self._nodes,
                make_room=partial(shutil.rmtree, path, ignore_errors=True),
                prune=self._written,
                on_done=self._done,
            )
        )
        self._seconds = time.perf_counter() - began
        interval.end(step)

    def _written(self, deletion: BackgroundDeletion) -> list[str]:
        # Called on rank 0 by the thread that has written this snapshot and nothing else. No other is deleted.
        self._thread_seconds = time.thread_time()
        return []

    def _done(self, error: PhalanxError | None) -> None:
        if error is not None:
            self._interval.stop()
            self._run.note(f"No more snapshots are taken, and restarts begin from checkpoints: {error}")

    def end(self) -> None:
        """Remove the snapshots of a fit that has ended well. Not collective."""
        if self._nodes.leads:
            shutil.rmtree(self._nodes.folder, ignore_errors=True)
