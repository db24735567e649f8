"""Worker processes of a DataLoader: they end with their rank, and briefly outlive a signal to the process group."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from ..system.processes import end_with_parent

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
"""The signals at which a run can be preempted."""
# A signal to the process group reaches the workers too, while their rank may still need batches for this long.
WORKER_SECONDS = 10.0


def start_worker(own: Callable[[int], None] | None, worker: int) -> None:
    """Initialize a worker process: it ends with its rank, and ignores signals for ``WORKER_SECONDS``.

    ``own`` is the loader's ``worker_init_fn``.
    """
    if threading.current_thread().name == "MainThread":
        # The kernel ties a process to the thread that forked it: another thread may end before the rank does.
        end_with_parent()
    for name in SIGNALS:
        signal.signal(getattr(signal, name), end_worker_later)
    if own is not None:
        own(worker)


def end_worker_later(signum: int, frame: FrameType | None) -> None:
    """Handle a signal in a worker: end ``WORKER_SECONDS`` later."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WORKER_SECONDS)
