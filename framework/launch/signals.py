"""Being told from outside to end: a signal sets a flag, the flag rides the triggers, all ranks leave at one step.

A handler does nothing else: it enters no collective, waits for nothing and writes no file. What it sets is seen at the
next boundary between two optimizer steps, where the run is saved and ends with an exit code that says "run the same
command again".
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.data._utils.worker import _worker_loop

from ..checkpoint.manifest_file import read_manifest
from ..core.errors import CheckpointError, ConfigurationError, NonFiniteError, Preempted, StorageError, unknown
from ..distributed.control import Triggers
from ..distributed.rendezvous import is_waiting
from ..system.environment import current_job
from ..system.processes import end_with_parent
from .slurm import NEAR_END, REQUEUED_AT, requeue

if TYPE_CHECKING:
    from ..run.run import Run

TRIGGER = "leave"
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
_CHECKPOINT, _CHECKPOINTS = "preempted{}.ckpt", re.compile(r"preempted(-v\d+)?\.ckpt")
# A loader's worker that is told to end by whoever tells its rank too: so long its rank may still need batches.
WORKER_SECONDS = 10.0
# Whoever interrupts a process group interrupts the ranks and what passes it on to them.
SAME_SECONDS = 1.0
_HANDLED = tuple(name for name in SIGNALS if hasattr(signal, name))

Handler = Callable[[int, FrameType | None], Any] | int | None


def check_signals(names: Iterable[str]) -> tuple[str, ...]:
    """Return the signals that a run is to end at in good order.

    Raises:
        ConfigurationError: one is not known, or is no signal that a process may handle so.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"preemption_signals={names!r} must be a list of names such as 'SIGTERM'.")
    for name in names:
        if name not in SIGNALS:
            raise unknown("preemption signal", name, SIGNALS)
    return tuple(names)


class SignalWatch:
    """Takes note of signals while it is entered; the handlers that were there are put back at the end.

    Signals that this process ignores stay ignored: a shell that starts a job in the background sets SIGINT so. Outside
    of the main thread, where Python handles no signals, nothing is taken note of.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [name for name in names if name in _HANDLED]
        self._before: dict[int, Handler] = {}
        self._process = os.getpid()
        self._told: str | None = None
        self._interrupted: float | None = None
        self._triggers: Triggers | None = None

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for name in self._names:
                signum = getattr(signal, name)
                before = signal.getsignal(signum)
                if before is not signal.SIG_IGN:
                    self._before[signum] = before
                    signal.signal(signum, self._take_note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, before in self._before.items():
            if before is not None:
                signal.signal(signum, before)
        self._before = {}

    def tell(self, triggers: Triggers) -> None:
        """Have signals raise a trigger, one that came before this call too."""
        self._triggers = triggers
        if self._told is not None:
            triggers.set(TRIGGER, self._told)

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._leave_to_others(signum, frame)
            return
        name = signal.Signals(signum).name
        if is_waiting():
            message = f"{name} came while this rank waited for the others to start; run the same command again."
            raise KeyboardInterrupt(message) if signum == signal.SIGINT else Preempted(message)
        if self._told is None:
            self._told = name
        if self._triggers is not None:
            self._triggers.set(TRIGGER, name)
        if signum == signal.SIGINT:
            self._interrupt()

    def _interrupt(self) -> None:
        """Let the second SIGINT stop at once, unless it is the first one once more, from another sender."""
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted > SAME_SECONDS:
            before = self._before[signal.SIGINT]
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
            signal.raise_signal(signal.SIGINT)

    def _leave_to_others(self, signum: int, frame: FrameType | None) -> None:
        """Be a process that was forked from this one: it has the handlers that there would be without this watch."""
        if getattr(multiprocessing.current_process(), "_target", None) is _worker_loop:
            # A loader's, which has not come to its own yet.
            _end_later(signum, frame)
            return
        self.__exit__()
        signal.raise_signal(signum)


def start_worker(own: Callable[[int], None] | None, worker: int) -> None:
    """Be a loader's worker: where the whole process group is told to end, its rank needs it a while longer.

    It goes when its rank does. ``own`` is the loader's ``worker_init_fn``.
    """
    if threading.current_thread().name == "MainThread":
        # Of a worker that another thread forked it is that thread that it would go with.
        end_with_parent()
    for name in _HANDLED:
        signal.signal(getattr(signal, name), _end_later)
    if own is not None:
        own(worker)


def _end_later(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WORKER_SECONDS)


def is_name(name: str) -> bool:
    """Whether ``name`` may be that of a checkpoint of a run that was told to end."""
    return _CHECKPOINTS.fullmatch(name) is not None


def _own_path(directory: Path, identity: str | None) -> Path:
    """Return the path of this run's checkpoint, which may exist; those of other runs stay."""
    version = 0
    while True:
        path = directory / _CHECKPOINT.format(f"-v{version}" if version else "")
        if not os.path.lexists(path):
            return path
        with suppress(CheckpointError, StorageError):
            if read_manifest(path).document.get("run") == identity is not None:
                return path
        version += 1


def leave(run: Run, directory: Path | None) -> NoReturn:
    """Save a run that was told to end, as it stands between two optimizer steps, and end it. Collective.

    Raises:
        Preempted: always, but after a SIGINT.
        KeyboardInterrupt: after a SIGINT.
        StorageError: it could not be saved.
    """
    assert run.told_to_leave is not None
    rank, name = run.told_to_leave
    step = run.progress.global_step
    where = f"rank {rank} got {name}" if run.world.size > 1 else f"{name} came"
    if name == NEAR_END:
        where = "the job's time is nearly up"
    message = f"{where}: stopped after optimizer step {step}, {_saved(run, directory)}"
    if name == "SIGINT":
        run.trainer.note(message)
        raise KeyboardInterrupt(message)
    job = current_job()
    if job is not None and name in REQUEUED_AT and run.trainer.requeue and run.world.is_global_zero:
        run.trainer.note(requeue(job))
    raise Preempted(message)


def _saved(run: Run, directory: Path | None) -> str:
    """Save a run and return the end of the sentence that tells of it. Collective."""
    if run.progress.global_batch == 0:
        return "before there was anything to save; run the same command again."
    if run.resumed is not None and run.resumed[1] == run.progress.global_batch:
        # What it would write, which may be large, is on the disk already.
        return f"with nothing new since {run.resumed[0]}; run the same command again."
    if directory is None:
        return "and saved nothing, since this run keeps no checkpoints."
    identity = run.trainer.directory.identity
    path = run.world.broadcast_object(str(_own_path(directory, identity)) if run.world.is_global_zero else "")
    try:
        run.trainer.save_checkpoint(path)
    except NonFiniteError as error:
        return f"and saved nothing: {error}"
    return f"and saved {path}; the same command with ckpt_path='auto' goes on from there."
