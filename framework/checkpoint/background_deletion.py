"""Work on threads: a save, and the deletion of old checkpoints.

Training never waits until the disk has freed the blocks of a deleted checkpoint.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from ..distributed.devices import make_current
from ..system.atomic_directories import delete_hidden
from ..system.atomic_files import free_bytes


class Background:
    """Runs ``work`` at once on a daemon thread. An exception is not raised there but stored in ``error``.

    Args:
        work: the task.
        device: the device of this rank, which the task may use.
        over: called on that thread at the end.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, over: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._device = device
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work, over), daemon=True, name="phalanx-save")
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the task has ended, at most ``seconds``; return whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Ask the task to end soon, as its result is no longer awaited."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether ``give_up`` was called."""
        return self._given_up.is_set()

    def _run(self, work: Callable[[], None], over: Callable[[], None]) -> None:
        try:
            # A new thread would open device 0.
            make_current(self._device)
            work()
        except BaseException as error:
            self.error = error
        finally:
            over()


# More directories wait only if saves are faster than the disk deletes; each still takes the space of a checkpoint.
_MOST_WAITING = 4


class BackgroundDeletion:
    """A queue of hidden directories that a thread deletes in order. The thread ends when the queue is empty.

    Only directories that already have a hidden name are accepted: a process killed at any instant leaves hidden
    directories, which ``clean_leftovers`` deletes when the run is continued, and never a visible checkpoint that lacks
    files.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Path] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._problems: list[str] = []

    def add(self, hidden: Path) -> None:
        """Add a hidden directory to the queue. Blocks only while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < _MOST_WAITING)
            self._queue.append(hidden)
            if len(self._queue) == 1:
                self._stopped.clear()
                self._thread = threading.Thread(target=self._run, daemon=True, name="phalanx-delete")
                self._thread.start()

    def make_room(self, directory: Path, size: int) -> None:
        """Wait for pending deletions if less than ``size`` bytes are free at ``directory``."""
        if self._queue and (free_bytes(directory) or 0) < size:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all directories are deleted, at most ``seconds``; return whether they are."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float | None = None) -> None:
        """Wait at most ``seconds``, then end the thread after its current file; the rest stays as hidden leftovers."""
        if not self.wait(seconds):
            self._stopped.set()
            self.wait()

    def problems(self) -> list[str]:
        """Return a sentence for each failed deletion since the last call."""
        with self._changed:
            problems, self._problems = self._problems, []
        return problems

    def _run(self) -> None:
        while True:
            problem = ""
            try:
                delete_hidden(self._queue[0], self._stopped.is_set)
            except Exception as error:
                # Nothing may end this thread early: a full queue would wait for it forever.
                problem = f"An old checkpoint was not deleted: {error}"
            with self._changed:
                self._queue.popleft()
                self._problems += [problem] if problem else []
                if self._stopped.is_set():
                    self._queue.clear()
                self._changed.notify_all()
                if not self._queue:
                    return
