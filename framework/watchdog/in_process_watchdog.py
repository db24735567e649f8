"""The watch over a run that no supervisor of ours watches: of one process, or one that torchrun or SLURM started.

A thread looks at what the process notes of itself, and hears of ranks that are further behind. It does not see a
process that is stopped, and where another thread holds the interpreter's lock it waits for it. Where a script runs, the
end is exit code 76; in a notebook, an interpreter or a test a person is told, once, and goes on.
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
from .heartbeat import LEARNED, SECTIONS, Beat, Heartbeat
from .peer_progress import AtWork
from .stack_dump import Stacks, parse_stacks
from .stall_detector import Stalls

LOOK_SECONDS = 0.25
_stages = itertools.count()


@contextmanager
def watched(heartbeat: Heartbeat, place: Placement, limits: tuple[float, ...]) -> Generator[None, None, None]:
    """Hold a stage whose stalls are seen: by the process that started this one, or by a thread of its own."""
    directory = error_dir()
    shared = directory is not None and os.path.isdir(directory) and heartbeat.share(directory, place.rank)
    heartbeat.begin(limits)
    watch = None if shared or not any(limit < math.inf for limit in limits[1:]) else SelfWatch(heartbeat, place, limits)
    if watch is not None:
        watch.start()
    try:
        yield
    finally:
        if watch is not None:
            watch.stop()
        heartbeat.enter(SECTIONS[0])


class SelfWatch(threading.Thread):
    """Looks at this process's own heartbeat until it is stopped."""

    def __init__(self, heartbeat: Heartbeat, place: Placement, limits: tuple[float, ...]) -> None:
        super().__init__(name="phalanx-stalls", daemon=True)
        self._place = place
        self._heartbeat = heartbeat
        shortest = min(limit for limit in (*limits[1:], math.inf) if limit != LEARNED)
        stage = next(_stages) if place.size > 1 else 0
        self._stalls = Stalls(self)
        self._at_work = AtWork(
            place.rank,
            stage,
            read=heartbeat.read,
            waits=lambda: self._own_stacks().waits,
            limit=shortest,
            clock=lambda: self._stalls.now,
        )
        self._over = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        if threading.current_thread() is not self:
            self.join()
        if self._at_work.is_alive():
            self._at_work.stop()

    def run(self) -> None:
        """Look from time to time."""
        if self._place.size > 1:
            self._at_work.start()
        try:
            while not self._over.wait(LOOK_SECONDS):
                if stall := self._stalls.look({self._place.rank: os.getpid()}):
                    self._tell(stall.message)
                    return
        except BaseException:
            # Others wait only for a rank that is watched.
            self._at_work.say_no_more()
            raise

    def beats(self, pids: Mapping[int, int]) -> dict[int, Beat | None]:
        """Return what this process noted last."""
        return {self._place.rank: self._heartbeat.read()}

    def stacks(self, pids: Mapping[int, int], beats: Mapping[int, Beat | None]) -> dict[int, Stacks]:
        """Return what this process does."""
        return {self._place.rank: self._own_stacks()}

    def another_is_behind(self) -> bool:
        """Whether another rank has told that this one waits for it."""
        return self._at_work.hears_of_one_behind

    def _own_stacks(self) -> Stacks:
        text = ""
        # There may be no room for a file.
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
        return parse_stacks(text, threading.main_thread().ident or 0)

    def _tell(self, message: str) -> None:
        stream = sys.__stderr__ or sys.stderr
        ends = can_rerun_script() or self._place.launcher is not None
        with contextlib.suppress(BaseException):
            if self._place.launcher is not None:
                message = "\n".join(f"[rank {self._place.rank}] {line}" for line in message.splitlines())
            stream.write(message + "\n")
            stream.flush()
        if ends and not self._over.is_set():
            os._exit(StalledError.exit_code)
