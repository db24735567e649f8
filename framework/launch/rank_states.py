"""``RankStates``: the position of each rank of this machine in ``ranks.json`` of the run, for readers of its files."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..system.failure_records import write_atomically
from ..system.run_directory import RANKS
from ..watchdog.stall_detector import SupervisedRanks

_PERIOD_SECONDS = 1.0
_CLOSE_SECONDS = 1.0


class RankStates:
    """Writes the file once a second while ranks run, from a thread: no disk can delay the supervisor.

    Args:
        records: the directory into which the ranks of the attempt write their records.
        directory: returns the run's directory, or None while there is none.
        running: returns the pids of the ranks that run.
    """

    def __init__(
        self, records: str, directory: Callable[[], Path | None], running: Callable[[], dict[int, int]]
    ) -> None:
        self._heartbeats = SupervisedRanks(records)
        self._directory = directory
        self._running = running
        self._written = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_SECONDS):
            # A rank may end, and its directory be removed, while it is looked at.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                self._write()

    def _write(self) -> None:
        directory = self._directory()
        if directory is None:
            return
        pids = self._running()
        records = self._heartbeats.records(pids)
        states: list[dict[str, Any]] = []
        for rank, record in sorted(records.items()):
            state: dict[str, Any] = {"rank": rank, "pid": pids[rank], "where": "starting"}
            if record is not None:
                state |= {"where": str(record), "step": record.step, "epoch": record.epoch, "batch": record.batch}
            states.append(state)
        text = json.dumps(states)
        if text != self._written:
            document = {"schema": 1, "updated": time.time(), "ranks": states}
            write_atomically(directory / RANKS, json.dumps(document) + "\n")
            self._written = text
