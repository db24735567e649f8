"""Preemption signals: a signal sets a flag that ranks exchange, so that all ranks stop at the same step.

A handler does nothing else: it calls no collective, does not wait and writes no file. The flag is read at the next
boundary between two optimizer steps, where the run is saved and exits with the code that means "run the same command
again".
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..core.errors import ConfigurationError, Preempted, unknown
from ..data.worker_process import SIGNALS, end_worker_later
from ..distributed.control import Signal, Triggers
from ..distributed.rendezvous import is_waiting

# Seconds in which two SIGINT count as one: an interrupt of a process group reaches a rank both directly and through
# the supervisor.
SAME_SECONDS = 1.0

Handler = Callable[[int, FrameType | None], Any] | int | None


def check_signals(names: Iterable[str]) -> tuple[str, ...]:
    """Return the signals at which a run saves and ends.

    Raises:
        ConfigurationError: a name is unknown, or not a signal that a process can handle.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"preemption_signals={names!r} must be a list of names such as 'SIGTERM'.")
    for name in names:
        if name not in SIGNALS:
            raise unknown("preemption signal", name, SIGNALS)
    return tuple(names)


def ignore_interrupts() -> None:
    """Ignore SIGINT from now on, in a forked rank that is about to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class SignalWatch:
    """Records signals within its context; restores the previous handlers on exit.

    Signals that this process ignores stay ignored: a shell starts background jobs with SIGINT ignored. Outside of the
    main thread, where Python cannot install handlers, no signals are recorded.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._before: dict[int, Handler] = {}
        self._process = os.getpid()
        self._received: str | None = None
        self._interrupted: float | None = None
        self._triggers: Triggers | None = None

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for name in self._names:
                signum = getattr(signal, name)
                before = signal.getsignal(signum)
                if before is not signal.SIG_IGN:
                    self._before[signum] = before
                    signal.signal(signum, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, before in self._before.items():
            if before is not None:
                signal.signal(signum, before)
        self._before = {}

    def report_to(self, triggers: Triggers) -> None:
        """Make signals raise a control signal, including one that arrived before this call."""
        self._triggers = triggers
        if self._received is not None:
            triggers.set(Signal.PREEMPT, self._received)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._leave_to_others(signum, frame)
            return
        name = signal.Signals(signum).name
        if is_waiting():
            message = f"{name} came while this rank waited for the others to start; run the same command again."
            raise KeyboardInterrupt(message) if signum == signal.SIGINT else Preempted(message)
        if self._received is None:
            self._received = name
        if self._triggers is not None:
            self._triggers.set(Signal.PREEMPT, name)
        if signum == signal.SIGINT:
            self._interrupt()

    def _interrupt(self) -> None:
        """Stop immediately at the second SIGINT, unless it is the first one delivered again by another sender."""
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted > SAME_SECONDS:
            before = self._before[signal.SIGINT]
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
            signal.raise_signal(signal.SIGINT)

    def _leave_to_others(self, signum: int, frame: FrameType | None) -> None:
        """In a forked process, restore the handlers that it would have without this object."""
        target = getattr(multiprocessing.current_process(), "_target", None)
        if getattr(target, "__module__", "").startswith("torch.utils.data."):
            # A DataLoader worker that has not installed its own handlers yet, nor the information about itself.
            end_worker_later(signum, frame)
            return
        self.__exit__()
        signal.raise_signal(signum)
