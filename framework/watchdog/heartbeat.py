"""``Heartbeat``: the progress of a rank, in a few bytes of shared memory that its supervisor reads.

A run passes through sections: set-up, epoch (between the batches of two epochs), step, evaluation, save and teardown.
A rank writes the section, a counter that changes with every heartbeat in it, and the current optimizer step, epoch
and batch. A step costs two writes of a struct and three of a number, into memory: no system call, no lock, no clock.
The reader has its own clock, and checks whether the bytes have changed. A supervisor creates the memory for its ranks,
so it outlives them, and shows the position of a rank that was killed too.

All ranks write the same sequence, so their positions can be compared: the others wait for the rank with
the lowest number. Within a step or an evaluation ``phase`` gives the position.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import signal
import struct
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError, unknown
from ..core.intervals import parse_duration

SECTIONS = ("outside", "set-up", "epoch", "step", "evaluation", "save", "teardown")
OUTSIDE, _STEP = SECTIONS.index("outside"), SECTIONS.index("step")
StallTimeout = float | str | timedelta | Mapping[str, float | str | timedelta | None] | None
LEARNED = 0.0
"""Value for a section's limit that is learned from the silences of this run."""

# Phases of a step: micro-batches are counted up to the last one's backward pass, where ranks wait for one another.
LAST_BACKWARD = 1 << 30
UPDATE = LAST_BACKWARD + 1

# The layout of the bytes: what changes once a stage (process, stack signal, limits), what changes with every sign of
# life (number, section, phase), and the position (step, epoch, batch).
_HEAD = struct.Struct(f"<QQQ{len(SECTIONS)}d")
_MARK = struct.Struct("<QII")
_POSITION = struct.Struct("<qqq")
_MARK_AT = 128
_PHASE_AT = _MARK_AT + 12
_POSITION_AT = _MARK_AT + _MARK.size
_NOT_STARTED = -1
_EMPTY = bytes(_POSITION_AT) + _POSITION.pack(_NOT_STARTED, _NOT_STARTED, _NOT_STARTED)
# Real-time signals that programs hardly use. One is sent only to a process that has registered a handler for it.
_STACK_SIGNALS = range(signal.SIGRTMIN + 9, signal.SIGRTMIN + 13) if hasattr(signal, "SIGRTMIN") else range(0)


def resolve_stall_timeout(given: Any) -> tuple[float, ...]:
    """Return the limit of each of ``SECTIONS`` in seconds: ``LEARNED`` to learn it, infinite for no limit.

    Args:
        given: None (learn all), seconds, a timedelta or a text such as ``"10 min"`` for all sections, a mapping by
            section, or False for no limits.

    Raises:
        ConfigurationError: ``given`` is something else, is not positive, or names an unknown section.
    """
    if isinstance(given, Mapping):
        for name in given:
            if name not in SECTIONS[1:]:
                raise unknown("stall_timeout's section", str(name), SECTIONS[1:])
        return tuple(_seconds(given.get(name)) for name in SECTIONS)
    # Outside of all sections the user's own code runs, which has no time limit.
    return (LEARNED, *(_seconds(given) for _ in SECTIONS[1:]))


def _seconds(given: Any) -> float:
    if given is None:
        return LEARNED
    if given is False:
        return math.inf
    if isinstance(given, str):
        given = parse_duration(given, "stall_timeout")
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigurationError(
            f"stall_timeout={given!r} must be a positive number of seconds or a timedelta, a dict of these by section "
            f"({', '.join(SECTIONS[1:])}), None to learn the limits, or False for no limits."
        )
    return float(seconds)


class Heartbeat:
    """Writes this rank's progress. ``phase[0]`` is increased, or set, within a step or an evaluation."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1
        self._stack_signal = 0
        self._section = OUTSIDE
        self._use(bytearray(_EMPTY))

    def _use(self, memory: Any) -> None:
        self._bytes = memory
        # A view of the four bytes of the phase: raising it costs one store, without a call.
        self.phase = memoryview(memory)[_PHASE_AT : _PHASE_AT + 4].cast("I")
        self.set_position: Callable[[int, int, int], None] = partial(_POSITION.pack_into, memory, _POSITION_AT)
        """Records the next optimizer step, and the epoch and the batch with which it begins."""

    def share(self, directory: str, rank: int) -> bool:
        """Write to memory that the supervisor can read from now on, and answer its stack signal.

        Returns:
            False if memory cannot be shared, or ``directory`` cannot be written.
        """
        path = _path(directory, rank)
        with contextlib.suppress(OSError, ValueError):
            if not path.exists():
                self._file = _create(path)
            if path != self._path:
                with open(path, "r+b") as file:
                    self._use(mmap.mmap(file.fileno(), len(_EMPTY)))
                self._path, self._stack_signal = path, _install_stack_handler(path.with_suffix(".stacks"))
            return True
        return False

    def begin(self, limits: tuple[float, ...]) -> None:
        """Enter the first section of a stage, to which ``limits`` apply."""
        # The counter continues from the value in memory: a second Trainer of this rank must not seem to be behind.
        self._number = int(_MARK.unpack_from(self._bytes, _MARK_AT)[0])
        main = threading.main_thread().ident or 0
        _HEAD.pack_into(self._bytes, 0, os.getpid(), main, self._stack_signal, *limits)
        self.enter("set-up")

    def enter(self, section: str) -> None:
        """Enter a section. Every rank must do so in the same order."""
        self._section = SECTIONS.index(section)
        self._number += 1
        _MARK.pack_into(self._bytes, _MARK_AT, self._number, self._section, 0)

    def mark_sync_point(self) -> None:
        """Record a point in the current section where this rank may have to wait for others."""
        self.enter(SECTIONS[self._section])

    @contextmanager
    def section(self, name: str) -> Generator[None, None, None]:
        """Enter another section within the context. Every rank must do so in the same order."""
        before = SECTIONS[self._section]
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def step(self, pack: Any = _MARK.pack_into) -> None:
        """Begin the recorded step, once its first batch has been fetched. Every rank must do so in the same order."""
        self._section = _STEP
        self._number = number = self._number + 1
        pack(self._bytes, _MARK_AT, number, _STEP, 0)

    def read(self) -> HeartbeatRecord:
        """Return the latest record."""
        return HeartbeatRecord.parse(bytes(self._bytes))


@dataclass(frozen=True)
class HeartbeatRecord:
    """The progress that one rank has written, and the limits that hold for it."""

    pid: int
    main_thread: int
    stack_signal: int
    """The signal on which the rank writes its stacks; 0 for none."""
    limits: tuple[float, ...]
    number: int
    section: int
    phase: int
    step: int
    """The current or next optimizer step; negative if training has not begun."""
    epoch: int
    batch: int

    @classmethod
    def parse(cls, content: bytes) -> HeartbeatRecord:
        """Read the bytes that a Heartbeat wrote."""
        pid, main, stack_signal, *limits = _HEAD.unpack_from(content, 0)
        mark, position = _MARK.unpack_from(content, _MARK_AT), _POSITION.unpack_from(content, _POSITION_AT)
        return cls(pid, main, stack_signal, tuple(limits), *mark, *position)

    @property
    def progress(self) -> tuple[int, int]:
        """A value to compare between ranks: a lower value means that the rank is further behind."""
        return self.number, self.phase

    @property
    def where(self) -> str:
        """The rank's position in its training as text; empty if training has not begun."""
        if self.step < 0:
            return ""
        # The epochs of a user's own loop are not known.
        return f"at step {self.step}" + (f" (epoch {self.epoch}, batch {self.batch})" if self.epoch >= 0 else "")

    def __str__(self) -> str:
        if self.number == 0 or self.section == OUTSIDE:
            return "outside of fit"
        return f"in the section {SECTIONS[self.section]!r} {self.where}".rstrip()


class HeartbeatReader:
    """Reads the heartbeat of one rank from another process."""

    def __init__(self, directory: str, rank: int) -> None:
        self._path = _path(directory, rank)
        self._memory: mmap.mmap | None = None
        self._content = b""
        self._record: HeartbeatRecord | None = None

    def create(self) -> None:
        """Create the memory, unless the rank has.

        The memory of a rank that created it itself ends with the rank: where this reader had not opened it before, the
        step at which the rank was killed would be unknown, and a step that fails again and again be started again.
        """
        with contextlib.suppress(OSError):
            if (file := _create(self._path)) >= 0:
                weakref.finalize(self, os.close, file)

    def read(self) -> HeartbeatRecord | None:
        """Return the latest record, the same object while it is unchanged; None before the rank's first stage."""
        if self._memory is None:
            with contextlib.suppress(OSError, ValueError), open(self._path, "rb") as file:
                self._memory = mmap.mmap(file.fileno(), len(_EMPTY), prot=mmap.PROT_READ)
        if self._memory is not None and (content := self._memory[:]) != self._content:
            self._content, record = content, HeartbeatRecord.parse(content)
            self._record = record if record.number else None
        return self._record

    @property
    def stacks(self) -> Path:
        """The file that the rank writes its stacks to."""
        return self._path.with_suffix(".stacks")


def _create(path: Path) -> int:
    """Create the shared memory behind ``path``, unless it exists; return a descriptor that keeps it alive, or -1.

    If the system has memory files, no disk is involved: a write never waits for a disk, nor fails on a full one.
    """
    # A rank and its supervisor may create it at the same time.
    with contextlib.suppress(FileExistsError):
        if not hasattr(os, "memfd_create"):
            with open(path, "xb") as plain:
                plain.write(_EMPTY)
            return -1
        file = os.memfd_create("phalanx-beat")
        try:
            os.write(file, _EMPTY)
            os.symlink(f"/proc/{os.getpid()}/fd/{file}", path)
        except BaseException:
            os.close(file)
            raise
        return file
    return -1


def _path(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.beat"


def _install_stack_handler(path: Path) -> int:
    """Have a signal write the stacks of all threads to a file; return the signal, or 0 where none is free.

    The handler is C code: it also runs while no thread can run Python.
    """
    if not hasattr(faulthandler, "register"):
        return 0
    for signum in _STACK_SIGNALS:
        # A signal that the program itself handles is not used.
        if signal.getsignal(signum) is signal.SIG_DFL:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                # The handler keeps the file open.
                faulthandler.register(signum, open(path, "ab", buffering=0), all_threads=True)  # noqa: SIM115
                return int(signum)
    return 0
