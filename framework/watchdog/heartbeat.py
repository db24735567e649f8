"""``Heartbeat``: how far a rank has come, in a few bytes of memory that its supervisor reads.

A run goes through sections: set-up, epoch (what lies between the batches of two epochs), step, evaluation, save and
teardown. A rank notes which one it is in, every sign of life in it, and the optimizer step, the epoch and the batch
where it stands. A step costs two writes of a struct and three of a number, into memory: no system call, no lock, no
clock. Whoever watches has a clock of its own, and looks whether the bytes have changed; what it has opened outlives the
rank, and so tells where one was that was killed.

What is noted goes the same way on all ranks, so that it can be compared: the rank whose number is lowest is the one
that the others wait for. Within a step or an evaluation ``phase`` counts on.
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
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.errors import ConfigurationError, unknown

SECTIONS = ("outside", "set-up", "epoch", "step", "evaluation", "save", "teardown")
OUTSIDE, _STEP = SECTIONS.index("outside"), SECTIONS.index("step")
StallTimeout = float | timedelta | Mapping[str, float | timedelta | None] | None
LEARNED = 0.0
"""Of a section's limit: it is learned from what is seen."""

# Phases of a step: micro-batches are counted up to the last one's backward pass, where ranks wait for one another.
LAST_BACKWARD = 1 << 30
UPDATE = LAST_BACKWARD + 1

_HEAD = struct.Struct(f"<QQQ{len(SECTIONS)}d")
_MARK = struct.Struct("<QII")
_PLACE = struct.Struct("<qqq")
_MARK_AT = 128
_PHASE_AT = _MARK_AT + 12
_PLACE_AT = _MARK_AT + _MARK.size
_NOWHERE = -1
_UNTOUCHED = bytes(_PLACE_AT) + _PLACE.pack(_NOWHERE, _NOWHERE, _NOWHERE)
# Of those that a program hardly uses; sent to a process only that has said it takes it.
_SIGNALS = range(signal.SIGRTMIN + 9, signal.SIGRTMIN + 13) if hasattr(signal, "SIGRTMIN") else range(0)


def resolve_stall_timeout(given: Any) -> tuple[float, ...]:
    """Return the limit of each of ``SECTIONS`` in seconds; ``LEARNED`` where it is learned, infinite for none.

    ``given`` is None, seconds or a timedelta for all sections, a mapping by section, or False for none.

    Raises:
        ConfigurationError: it is none of these, not positive, or names a section that does not exist.
    """
    if isinstance(given, Mapping):
        for name in given:
            if name not in SECTIONS[1:]:
                raise unknown("stall_timeout's section", str(name), SECTIONS[1:])
        return tuple(_seconds(given.get(name)) for name in SECTIONS)
    # Outside of all sections is the user's own code, which may take as long as it likes.
    return (LEARNED, *(_seconds(given) for _ in SECTIONS[1:]))


def _seconds(given: Any) -> float:
    if given is None:
        return LEARNED
    if given is False:
        return math.inf
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigurationError(
            f"stall_timeout={given!r} must be a positive number of seconds or a timedelta, a dict of these by section "
            f"({', '.join(SECTIONS[1:])}), None to learn the limits, or False for none."
        )
    return float(seconds)


class Heartbeat:
    """What this rank notes of itself. ``phase[0]`` is to be raised, or set, within a step or an evaluation."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1
        self._asks = 0
        self._section = OUTSIDE
        self._use(bytearray(_UNTOUCHED))

    def _use(self, memory: Any) -> None:
        self._bytes = memory
        self.phase = memoryview(memory)[_PHASE_AT : _PHASE_AT + 4].cast("I")

    def share(self, directory: str, rank: int) -> bool:
        """Note from now on where the process that started this one can read it; stacks too, when it asks for them.

        Returns False where there is no memory to share, or no place for its name.
        """
        path = _beat_path(directory, rank)
        with contextlib.suppress(OSError, ValueError):
            if not path.exists():
                self._file = _make(path)
            if path != self._path:
                with open(path, "r+b") as file:
                    self._use(mmap.mmap(file.fileno(), len(_UNTOUCHED)))
                self._path, self._asks = path, _offer_stacks(path.with_suffix(".stacks"))
            return True
        return False

    def begin(self, limits: tuple[float, ...]) -> None:
        """Enter the first section of a stage, in which the given limits hold."""
        self._number = int(_MARK.unpack_from(self._bytes, _MARK_AT)[0])
        main = threading.main_thread().ident or 0
        _HEAD.pack_into(self._bytes, 0, os.getpid(), main, self._asks, *limits)
        self.enter("set-up")

    def enter(self, section: str) -> None:
        """Be in another section. All ranks do so alike."""
        self._section = SECTIONS.index(section)
        self._number += 1
        _MARK.pack_into(self._bytes, _MARK_AT, self._number, self._section, 0)

    def reach(self) -> None:
        """Note that this rank has come to a place in its section where it may have to wait for the others."""
        self.enter(SECTIONS[self._section])

    @contextmanager
    def section(self, name: str) -> Generator[None, None, None]:
        """Be in another section for a while. All ranks do so alike."""
        before = SECTIONS[self._section]
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def stand_at(self, step: int, epoch: int, batch: int, pack: Any = _PLACE.pack_into) -> None:
        """Note which optimizer step comes next, and the epoch and the batch that it begins with."""
        pack(self._bytes, _PLACE_AT, step, epoch, batch)

    def step(self, pack: Any = _MARK.pack_into) -> None:
        """Begin that step, whose data is there. All ranks do so alike."""
        self._section = _STEP
        self._number = number = self._number + 1
        pack(self._bytes, _MARK_AT, number, _STEP, 0)

    def read(self) -> Beat:
        """Return what was noted last."""
        return Beat.of(bytes(self._bytes))


@dataclass(frozen=True)
class Beat:
    """What a rank has noted: where it is, and what it is to be measured by."""

    pid: int
    main_thread: int
    asks: int
    """The signal at which it writes its stacks; 0 for none."""
    limits: tuple[float, ...]
    number: int
    section: int
    phase: int
    step: int
    """The optimizer step that is under way, or comes next; negative where training has not begun."""
    epoch: int
    batch: int

    @classmethod
    def of(cls, content: bytes) -> Beat:
        """Read the bytes that a Heartbeat wrote."""
        pid, main, asks, *limits = _HEAD.unpack_from(content, 0)
        mark, where = _MARK.unpack_from(content, _MARK_AT), _PLACE.unpack_from(content, _PLACE_AT)
        return cls(pid, main, asks, tuple(limits), *mark, *where)

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank has come, to be compared between ranks."""
        return self.number, self.phase

    @property
    def where(self) -> str:
        """Where in its training the rank is; empty where that has not begun."""
        return "" if self.step < 0 else f"at step {self.step} (epoch {self.epoch}, batch {self.batch})"

    def __str__(self) -> str:
        if self.number == 0 or self.section == OUTSIDE:
            return "outside of fit"
        return f"in the section {SECTIONS[self.section]!r} {self.where}".rstrip()


class BeatReader:
    """Reads what one rank notes, once it does."""

    def __init__(self, directory: str, rank: int) -> None:
        self._path = _beat_path(directory, rank)
        self._memory: mmap.mmap | None = None
        self._content = b""
        self._beat: Beat | None = None

    def read(self) -> Beat | None:
        """Return what the rank noted last, the same object while that is unchanged; None before it has begun."""
        if self._memory is None:
            with contextlib.suppress(OSError, ValueError), open(self._path, "rb") as file:
                self._memory = mmap.mmap(file.fileno(), len(_UNTOUCHED), prot=mmap.PROT_READ)
        if self._memory is not None and (content := self._memory[:]) != self._content:
            self._content, beat = content, Beat.of(content)
            self._beat = beat if beat.number else None
        return self._beat

    @property
    def stacks(self) -> Path:
        """The file that the rank writes its stacks to."""
        return self._path.with_suffix(".stacks")


def _make(path: Path) -> int:
    """Make the memory that ``path`` stands for; return a descriptor that keeps it.

    Memory without a disk behind it, where the system has that: a write never waits for one, nor fails on a full one.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("phalanx-beat")
        os.write(file, _UNTOUCHED)
        os.symlink(f"/proc/{os.getpid()}/fd/{file}", path)
        return file
    path.write_bytes(_UNTOUCHED)
    return -1


def _beat_path(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.beat"


def _offer_stacks(path: Path) -> int:
    """Have a signal write the stacks of all threads to a file, even while none of them can run Python; return it."""
    if not hasattr(faulthandler, "register"):
        return 0
    for signum in _SIGNALS:
        # One that the program itself handles is left to it.
        if signal.getsignal(signum) is signal.SIG_DFL:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                # The handler keeps the file.
                faulthandler.register(signum, open(path, "ab", buffering=0), all_threads=True)  # noqa: SIM115
                return int(signum)
    return 0
