"""What ranks print: rank 0's goes to the screen as it comes, and that of each into a file of the run's directory.

A run that keeps no files shows the lines of the other ranks on the screen too, each marked with its rank.

The process that watches the ranks reads it, so that a rank that is killed loses nothing of what it printed. A rank's
file is ``ranks/rank_<n>.log``; until the run has a directory, and where it has none, the end of it is kept in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

FOLDER = "ranks"
_CHUNK_BYTES = 1 << 16
# Of what is printed before the run has a directory, the beginning; and the end of everything, for a failure.
_WAITING_BYTES = 1 << 20
_TAIL_BYTES = 1 << 13
_LOOK_SECONDS = 0.2
_QUIET_SECONDS = 0.05
_SETTLE_SECONDS = 2.0


class _Kept:
    """What one rank has printed."""

    def __init__(self, rank: int, hide: Callable[[str], str]) -> None:
        self.rank = rank
        self.tail = b""
        self._hide = hide
        self._line = b""
        self._waiting: bytearray | None = bytearray()
        self._file: BinaryIO | None = None

    def add(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if self._file is not None:
            self._write(data)
        elif self._waiting is not None and len(self._waiting) < _WAITING_BYTES:
            self._waiting += data

    def keep_in(self, folder: Path, head: str) -> None:
        if self._waiting is None:
            return
        waiting, self._waiting = bytes(self._waiting), None
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            self._file = (folder / f"rank_{self.rank}.log").open("ab", buffering=0)
            self._write(head.encode() + waiting)

    def _write(self, data: bytes) -> None:
        # Whole lines, so that no secret comes in two parts.
        data = self._line + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _WAITING_BYTES:
            end = len(data)
        self._line = data[end:]
        self._put(data[:end])

    def _put(self, lines: bytes) -> None:
        text = self._hide(lines.decode(errors="surrogateescape"))
        try:
            if self._file is not None:
                self._file.write(text.encode(errors="surrogateescape"))
        except OSError:
            # A full disk ends the file, not the run.
            self.close()

    def close(self) -> None:
        rest, self._line = self._line, b""
        if rest:
            self._put(rest)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class _Screen:
    """The descriptor where one stream of one rank is shown, and the line that is not complete yet."""

    def __init__(self, descriptor: int, label: bytes) -> None:
        self._descriptor = descriptor
        self._label = label
        self._line = b""
        self._read_by_someone = True

    def show(self, data: bytes) -> None:
        """Write what a rank printed; whole lines of it where they are marked."""
        if self._label:
            *lines, self._line = (self._line + data).split(b"\n")
            data = b"".join(self._label + line + b"\n" for line in lines)
        if self._read_by_someone:
            self._read_by_someone = _write(self._descriptor, data)

    def end(self) -> None:
        """Write what is left of a line."""
        if self._line:
            self.show(b"\n")


class RankOutput:
    """Reads what the ranks of one attempt print, on a thread of its own.

    Args:
        find_directory: asked now and then for the run's directory; None as long as it has none.
        head: the line with which this attempt begins in each file.
        shows_all: whether the lines of ranks other than 0 are shown too.
        hide: takes out of a line what the files must not hold.
    """

    def __init__(
        self,
        find_directory: Callable[[], Path | None],
        head: str,
        shows_all: bool = False,
        hide: Callable[[str], str] = str,
    ) -> None:
        self._find_directory = find_directory
        self._head = f"--- {head}\n"
        self._selector = selectors.DefaultSelector()
        self._kept: list[_Kept] = []
        self._shows_all = shows_all
        self._hide = hide
        self._settling = False
        self._showing_since: float | None = None
        self.folder: Path | None = None
        """Where the files are, once there are any."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        self._thread = threading.Thread(target=self._run, name="phalanx-output", daemon=True)

    def __enter__(self) -> RankOutput:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    @contextlib.contextmanager
    def streams(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the descriptors for a rank's standard output and error; they are closed here at the end."""
        kept = _Kept(rank, self._hide)
        self._kept.append(kept)
        shown = rank == 0 or self._shows_all
        label = b"" if rank == 0 else b"[rank %d] " % rank
        output = self._stream(kept, _Screen(1, label) if shown else None, shown and rank == 0 and os.isatty(1))
        # Where both go to one place, what is printed keeps its order.
        error = output
        if shown and not _same_file(1, 2):
            error = self._stream(kept, _Screen(2, label), rank == 0 and os.isatty(2))
        try:
            yield output, error
        finally:
            for descriptor in {output, error}:
                os.close(descriptor)

    def _stream(self, kept: _Kept, screen: _Screen | None, is_terminal: bool) -> int:
        reading, writing = _terminal() if is_terminal else os.pipe()
        self._selector.register(reading, selectors.EVENT_READ, (kept, screen))
        return writing

    def is_blocked(self) -> bool:
        """Whether who reads the screen has stopped to, as a pager or Ctrl-S does: ranks that print wait for that."""
        since = self._showing_since
        return since is not None and time.monotonic() - since > _LOOK_SECONDS

    def tail(self, rank: int, lines: int) -> list[str]:
        """Return the last lines that a rank printed."""
        return self._hide(self._kept[rank].tail.decode(errors="replace")).splitlines()[-lines:]

    def add(self, rank: int, text: str) -> None:
        """Add a text to a rank's file alone, once ``settle`` was called."""
        self._kept[rank].add(text.encode(errors="backslashreplace"))

    def settle(self) -> None:
        """Read what is left, once the ranks have ended. What they left running may hold the other ends: no end is
        waited for. Safe to be called twice."""
        self._settling = True
        self._thread.join(_SETTLE_SECONDS)

    def close(self) -> None:
        """Close the files."""
        for kept in self._kept:
            kept.close()

    def _run(self) -> None:
        looked = 0.0
        while True:
            settling = self._settling
            ready = self._selector.select(_QUIET_SECONDS if settling else _LOOK_SECONDS) if self._open() else []
            for key, _ in ready:
                self._read(key.fd, *key.data)
            now = time.monotonic()
            if self.folder is None and (settling or now - looked > _LOOK_SECONDS):
                looked = now
                self._look()
            if self.folder is not None:
                # Ranks may still be joining.
                for kept in list(self._kept):
                    kept.keep_in(self.folder, self._head)
            if settling and not ready:
                break
            if not self._open():
                time.sleep(_QUIET_SECONDS)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _open(self) -> int:
        return len(self._selector.get_map())

    def _look(self) -> None:
        directory = self._find_directory()
        if directory is not None and directory.is_dir():
            self.folder = directory / FOLDER

    def _read(self, descriptor: int, kept: _Kept, screen: _Screen | None) -> None:
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except OSError:
            # A terminal whose other end is closed.
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            if screen is not None:
                screen.end()
            return
        kept.add(data)
        if screen is not None:
            self._showing_since = time.monotonic()
            screen.show(data)
            self._showing_since = None


def _write(screen: int, data: bytes) -> bool:
    """Write to the screen; return False where nobody reads it any more."""
    while data:
        try:
            data = data[os.write(screen, data) :]
        except BlockingIOError:
            select.select([], [screen], [], _LOOK_SECONDS)
        except OSError:
            return False
    return True


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def _terminal() -> tuple[int, int]:
    """Return the reading and the writing end of a terminal as large as this one, which changes nothing it gets."""
    reading, writing = os.openpty()
    with contextlib.suppress(OSError, termios.error):
        modes = termios.tcgetattr(writing)
        modes[1] &= ~termios.OPOST
        termios.tcsetattr(writing, termios.TCSANOW, modes)
        size = fcntl.ioctl(1 if os.isatty(1) else 2, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    return reading, writing
