"""Recordings of what a program did with emulated devices: each entry has the Python stack that led to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import cuda_emulation

# The order is that of `Kind` in emulated.h, which describes them.
KINDS = ("sync", "event", "pageable", "upload", "download", "device", "race")
# The threads on which autograd runs backward passes are not Python's.
NATIVE = "a thread of torch"
_DEPTH = 24
_HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True)
class Entry:
    """One event: its kind, one of ``KINDS``; what it was; device; name of the thread; stack; current stream, 0 for the
    default one."""

    kind: str
    what: str
    device: int
    thread: str
    stack: tuple[str, ...]
    stream: int

    def __str__(self) -> str:
        lines = "".join(f"\n      {line}" for line in self.stack)
        return f"{self.kind}: {self.what}, cuda:{self.device}, on {self.thread!r}{lines}"


@dataclass
class Recording:
    """The entries so far, in order."""

    entries: list[Entry] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Entry]:
        """Return the entries of these kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    def clear(self) -> None:
        """Forget what has been recorded; each thread's next use of a device is recorded again."""
        self.entries.clear()


@contextlib.contextmanager
def recorded(*kinds: str) -> Iterator[Recording]:
    """Record what this process does within the block, on all threads; only these kinds, where any are given.

    Nothing is recorded on devices that are not emulated.
    """
    recording = Recording()
    if not cuda_emulation.is_enabled():
        yield recording
        return
    wanted = frozenset(kinds or KINDS)

    library = cuda_emulation.library()

    def note(number: int, what: bytes, device: int) -> None:
        if KINDS[number] in wanted:
            stream = library.emulated_stream(device)
            recording.entries.append(Entry(KINDS[number], what.decode(), device, _thread(), _stack(), stream))

    listener = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)(note)
    library.emulated_listen(listener)
    try:
        yield recording
    finally:
        library.emulated_listen(None)
        # A thread may be in it just now.
        _KEPT.append(listener)


_KEPT: list[object] = []


def _thread() -> str:
    # Not `current_thread`, which would register a thread of torch as a dummy, as other code may have done.
    ident = threading.get_ident()
    named = (each.name for each in threading.enumerate() if each.ident == ident and not _is_dummy(each))
    return next(named, NATIVE)


def _is_dummy(thread: threading.Thread) -> bool:
    """Whether Python has not started the thread."""
    return isinstance(thread, threading._DummyThread)


def _stack() -> tuple[str, ...]:
    """Return the innermost frames, innermost first, without those of the emulation."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(lines) < _DEPTH:
        path = frame.f_code.co_filename
        if not path.startswith(_HERE + os.sep) or os.path.basename(path).startswith("test_"):
            name = path.rpartition("site-packages" + os.sep)[2]
            lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(lines)
