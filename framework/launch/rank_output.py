"""``RankOutput``: shows the output of rank 0 on the screen, and writes the output of every rank to a file.

The supervisor reads the output through pipes, so the output of a killed rank is not lost. A rank's file is
``ranks/rank_<n>.log`` in the run's directory; until the run has a directory, the output is held in memory. A run
without files shows the lines of the other ranks on the screen too, each prefixed with its rank. If the screen is a
terminal, rank 0 writes to a pseudo-terminal, so that its progress bar is drawn live.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .rank_screen import Screen, follow_size, terminal

FOLDER = "ranks"
_CHUNK_BYTES = 1 << 16
# Bytes held in memory: the beginning, until there is a directory; and the end, which is shown after a failure.
_HELD_BYTES = 1 << 20
_TAIL_BYTES = 1 << 13
_LOOK_SECONDS = 0.2
# After the ranks have ended, output that arrives within this time is still read.
_QUIET_SECONDS = 0.05
_FINISH_SECONDS = 2.0


class _RankLog:
    """The output of one rank: its file, or the text held in memory for it."""

    def __init__(self, rank: int, hide: Callable[[str], str]) -> None:
        self.rank = rank
        self.tail = b""
        self._hide = hide
        self._line = b""
        self._held: bytearray | None = bytearray()
        self._file: BinaryIO | None = None

    def add(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if self._file is not None:
            self._write(data)
        elif self._held is not None and len(self._held) < _HELD_BYTES:
            self._held += data

    def open(self, folder: Path, head: str) -> None:
        """Open the file and write the text held so far. Does nothing if the file is open already."""
        if self._held is None:
            return
        held, self._held = bytes(self._held), None
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            self._file = (folder / f"rank_{self.rank}.log").open("ab", buffering=0)
            self._write(head.encode() + held)

    def _write(self, data: bytes, is_last: bool = False) -> None:
        data = self._line + data
        # Only complete lines are written: a secret that arrives in two parts would not be recognized.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if is_last or (not end and len(data) > _HELD_BYTES):
            end = len(data)
        self._line, text = data[end:], self._hide(data[:end].decode(errors="surrogateescape"))
        try:
            if self._file is not None:
                self._file.write(text.encode(errors="surrogateescape"))
        except OSError:
            # On a full disk the file ends, and the run continues.
            self._file = None

    def close(self) -> None:
        self._write(b"", is_last=True)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class RankOutput:
    """Reads the output of the ranks of one attempt, in a separate thread.

    Args:
        find_directory: returns the run's directory, or None while there is none; called at intervals.
        head: the first line of this attempt in each file.
        shows_all: whether the lines of ranks other than 0 are shown too.
        hide: removes secrets from text that is written to files.
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
        self._logs: dict[int, _RankLog] = {}
        self._shows_all = shows_all
        self._hide = hide
        self._finishing = False
        self._showing_since: float | None = None
        self.folder: Path | None = None
        """The folder of the files; None before the first file."""
        for stream in (sys.stdout, sys.stderr):
            # Flushed so that the output of this process so far precedes the output of the ranks.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        self._thread = threading.Thread(target=self._run, name="phalanx-output", daemon=True)

    def __enter__(self) -> RankOutput:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @contextlib.contextmanager
    def streams(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the descriptors for a rank's standard output and error; this process closes its copies at the end."""
        log = _RankLog(rank, self._hide)
        self._logs[rank] = log
        shown = rank == 0 or self._shows_all
        label = b"" if rank == 0 else b"[rank %d] " % rank
        output = self._stream(log, 1 if shown else None, label)
        # If both streams have the same destination, a single pipe preserves their order.
        error = output
        if shown and not _same_file(1, 2):
            error = self._stream(log, 2, label)
        try:
            yield output, error
        finally:
            for descriptor in {output, error}:
                os.close(descriptor)

    def _stream(self, log: _RankLog, shown_on: int | None, label: bytes) -> int:
        is_terminal = shown_on is not None and not label and os.isatty(shown_on)
        screen = None if shown_on is None else Screen(shown_on, label, is_terminal)
        reading, writing = terminal() if is_terminal else os.pipe()
        self._selector.register(reading, selectors.EVENT_READ, (log, screen))
        return writing

    def is_blocked(self) -> bool:
        """Whether ranks that print wait for the screen, for example for a pager or after Ctrl-S."""
        since = self._showing_since
        return since is not None and time.monotonic() - since > _LOOK_SECONDS

    def tail(self, rank: int, lines: int) -> list[str]:
        """Return the last lines that a rank printed."""
        return self._hide(self._logs[rank].tail.decode(errors="replace")).splitlines()[-lines:]

    def add(self, rank: int, text: str) -> None:
        """Add a text only to a rank's file, after ``finish``."""
        self._logs[rank].add(text.encode(errors="backslashreplace"))

    def finish(self) -> None:
        """Read the remaining output after the ranks have ended. May be called twice.

        It does not wait for the end of a pipe: processes that ranks have left running may hold its other end.
        """
        self._finishing = True
        self._thread.join(_FINISH_SECONDS)

    def close(self) -> None:
        """Close the files."""
        for log in self._logs.values():
            log.close()

    def _run(self) -> None:
        looked = 0.0
        while True:
            finishing = self._finishing
            ready = self._show(_QUIET_SECONDS if finishing else _LOOK_SECONDS)
            now = time.monotonic()
            if self.folder is None and (finishing or now - looked > _LOOK_SECONDS):
                looked = now
                directory = self._find_directory()
                if directory is not None and directory.is_dir():
                    self.folder = directory / FOLDER
            if self.folder is not None:
                # A copy of the list: ranks may still be added.
                for log in list(self._logs.values()):
                    log.open(self.folder, self._head)
            self._follow_size()
            if finishing and not ready:
                break
            if not self._num_open():
                time.sleep(_QUIET_SECONDS)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _show(self, seconds: float) -> bool:
        """Read and show output that arrives within a time; return whether there was any."""
        ready = self._selector.select(seconds) if self._num_open() else []
        for key, _ in ready:
            self._read(key.fd, *key.data)
        if not ready:
            self._pause()
        return bool(ready)

    def _pause(self) -> None:
        # A copy: ranks may still be added.
        for key in list(self._selector.get_map().values()):
            _, screen = key.data
            if screen is not None:
                screen.pause()

    def _follow_size(self) -> None:
        """Give the terminals of rank 0 the size of the one that shows them, which the user may have changed."""
        for key in list(self._selector.get_map().values()):
            _, screen = key.data
            if screen is not None and screen.is_terminal:
                follow_size(screen.descriptor, key.fd)

    def _num_open(self) -> int:
        return len(self._selector.get_map())

    def _read(self, descriptor: int, log: _RankLog, screen: Screen | None) -> None:
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
        log.add(data)
        if screen is not None:
            self._showing_since = time.monotonic()
            screen.show(data)
            self._showing_since = None


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
