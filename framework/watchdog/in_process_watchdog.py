"""In-process stall watchdog, used if phalanx did not launch the ranks: one process, torchrun, SLURM, MPI.

A thread checks this process's own heartbeat, and reads from the store whether another rank is further behind. It does
not detect a process that is stopped, and cannot run while another thread holds the interpreter's lock. In a script a
stall ends the process with exit code 76. In a notebook, an interpreter or a test the stall is reported once on
standard error, and the process continues.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import os
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ..core.errors import StalledError
from ..system.entry_script import can_rerun_script
from ..system.environment import error_dir
from ..system.launcher_env import Placement
from .heartbeat import LEARNED, SECTIONS, Heartbeat, HeartbeatRecord
from .peer_progress import PeerProgress
from .stack_dump import Stacks, parse_stacks
from .stall_detector import StallDetector

CHECK_SECONDS = 0.25
_stages = itertools.count()


@contextmanager
def watched(heartbeat: Heartbeat, placement: Placement, limits: tuple[float, ...]) -> Generator[None, None, None]:
    """Watch a stage for stalls, through the supervisor if there is one, else through a thread of this process."""
    directory = error_dir()
    shared = directory is not None and os.path.isdir(directory) and heartbeat.share(directory, placement.rank)
    heartbeat.begin(limits)
    has_limit = any(limit < math.inf for limit in limits[1:])
    watchdog = InProcessWatchdog(heartbeat, placement, limits) if has_limit and not shared else None
    if watchdog is not None:
        watchdog.start()
    try:
        yield
    finally:
        if watchdog is not None:
            watchdog.stop()
        heartbeat.enter(SECTIONS[0])


class InProcessWatchdog(threading.Thread):
    """Checks this process's own heartbeat until it is stopped."""

    def __init__(self, heartbeat: Heartbeat, placement: Placement, limits: tuple[float, ...]) -> None:
        super().__init__(name="phalanx-stalls", daemon=True)
        self._placement = placement
        self._heartbeat = heartbeat
        self._detector = StallDetector(self)
        self._peers = PeerProgress(
            placement.rank,
            next(_stages) if placement.size > 1 else 0,
            read=heartbeat.read,
            waits=lambda: self._own_stacks().waits,
            limit=min(limit for limit in (*limits[1:], math.inf) if limit != LEARNED),
            clock=lambda: self._detector.now,
        )
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self:
            self.join()
        if self._peers.is_alive():
            self._peers.stop()

    def run(self) -> None:
        """Check at intervals; the thread ends after it has reported a stall."""
        if self._placement.size > 1:
            self._peers.start()
        try:
            while not self._stopped.wait(CHECK_SECONDS):
                if stall := self._detector.check({self._placement.rank: os.getpid()}):
                    self._report(stall.message)
                    return
        except BaseException:
            # Without this watchdog the rank must not be published as working: the others would wait forever.
            self._peers.request_stop()
            raise

    def records(self, pids: Mapping[int, int]) -> dict[int, HeartbeatRecord | None]:
        """Return this process's latest record."""
        return {self._placement.rank: self._heartbeat.read()}

    def stacks(self, pids: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None]) -> dict[int, Stacks]:
        """Return this process's stacks."""
        return {self._placement.rank: self._own_stacks()}

    def another_is_behind(self) -> bool:
        """Whether a rank with less progress has published that it is working."""
        return self._peers.peer_is_behind

    def _own_stacks(self) -> Stacks:
        text = ""
        # The file cannot be written on a full disk.
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
        return parse_stacks(text, threading.main_thread().ident or 0)

    def _report(self, message: str) -> None:
        stream = sys.__stderr__ or sys.stderr
        ends = can_rerun_script() or self._placement.launcher is not None
        with contextlib.suppress(BaseException):
            if self._placement.launcher is not None:
                message = "\n".join(f"[rank {self._placement.rank}] {line}" for line in message.splitlines())
            stream.write(message + "\n")
            stream.flush()
        if ends and not self._stopped.is_set():
            os._exit(StalledError.exit_code)
