"""``Sender``: a thread that passes the records of an outbox to a remote store, and waits while it cannot be reached."""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ..framework.metrics.json_lines import read_lines
from ..framework.system.environment import hiding_secrets
from ..framework.system.redaction import MASK

Record = dict[str, Any]

# How often the thread looks for new records, and the longest pause after failures, in seconds.
_PERIOD_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
# How long the end of a run waits for a store that has not answered before.
_FAILING_SECONDS = 5.0
# Longer messages of libraries are cut off.
_MOST_CHARACTERS = 200


class Refused(Exception):
    """The store does not accept a record, and would not accept it later."""


class Store(ABC):
    """A remote store of one run. All methods are called in the sender's thread."""

    batch_records = 1
    """The largest number of records in a call of ``deliver``."""
    keeps_position = False
    """Whether the number of delivered records is kept in a file, for a store that cannot be asked for it."""

    @abstractmethod
    def connect(self, records: Iterator[Record], sent: int) -> int:
        """Open the run, which is continued if the store has it, and return how many of the records it has.

        Args:
            records: the records so far.
            sent: the number of delivered records by the file; the store may have some more.
        """

    @abstractmethod
    def deliver(self, first: int, records: Sequence[Record]) -> None:
        """Store records, the first of which is number ``first``.

        Raises:
            Refused: one of them is not accepted.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run with ``"success"``, ``"failed"`` or ``"interrupted"``."""


class Sender:
    """Delivers the records of a file in order, in a thread of its own.

    The file is the queue: the memory in use does not grow while the store cannot be reached. A failure is reported
    once and repeated with growing pauses; a record that the store refuses is left out with a report.

    Args:
        path: the file of records.
        store: their destination.
        say: called with a sentence for the console.
        name: that of the logger, for messages.
    """

    def __init__(self, path: Path, store: Store, say: Callable[[str], None], name: str) -> None:
        self.store = store
        self._path = path
        self._say = say
        self._name = name
        self._delivered = 0
        self._position = 0
        self._connected = Event()
        self._status: str | None = None
        self._wake = Event()
        self._failing = False
        self._abandoned = False
        self._reported: set[str] = set()
        # A daemon thread: a store that hangs must not keep the process from ending.
        self._thread = Thread(target=self._run, name=f"phalanx-{name}-sender", daemon=True)
        self._thread.start()

    def connected(self, seconds: float) -> bool:
        """Wait until the store is connected, at most ``seconds``, and return whether it is."""
        self._wake.set()
        return self._connected.wait(seconds)

    def finish(self, status: str, seconds: float) -> int:
        """Deliver the remaining records, close the store, and end the thread.

        Waits at most ``seconds``, and a few seconds if the store could not be reached before.

        Returns:
            The number of records that are not delivered.
        """
        self._status = status
        self._wake.set()
        self._thread.join(min(seconds, _FAILING_SECONDS) if self._failing else seconds)
        # A thread that is late must not send what a later one sends.
        self._abandoned = True
        return sum(1 for _ in read_lines(self._path, self._position))

    def _run(self) -> None:
        pause = _PERIOD_SECONDS
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            finishing = self._status is not None
            try:
                self._send()
            except Exception as error:
                self._failing = True
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._report("failure", self._describe(error))
            else:
                self._failing = False
                pause = _PERIOD_SECONDS
            if finishing:
                break
        if self._connected.is_set() and self._status is not None:
            with contextlib.suppress(Exception):
                self.store.close(self._status)

    def _send(self) -> None:
        if not self._connected.is_set():
            self._connect()
        most = self.store.batch_records
        while not self._abandoned and (batch := list(islice(read_lines(self._path, self._position), most))):
            records = [record for _, record in batch]
            try:
                self.store.deliver(self._delivered, records)
            except Refused:
                self._deliver_singly(records)
            self._delivered += len(batch)
            self._position = batch[-1][0]
            if self.store.keeps_position:
                _write_number(self._sent_path, self._delivered)

    def _connect(self) -> None:
        sent = _read_number(self._sent_path) if self.store.keeps_position else 0
        known = self.store.connect((record for _, record in read_lines(self._path)), sent)
        for position, _ in islice(read_lines(self._path), known):
            self._delivered += 1
            self._position = position
        self._connected.set()

    def _deliver_singly(self, records: Sequence[Record]) -> None:
        for number, record in enumerate(records):
            try:
                self.store.deliver(self._delivered + number, [record])
            except Refused as error:
                self._report("refusal", f"{self._name} leaves out what was refused ({error}).")

    def _describe(self, error: Exception) -> str:
        return (
            f"{self._name}: the server cannot be reached ({type(error).__name__}: {first_line(error)}); training "
            f"continues, and the records are kept in {self._path} until it can."
        )

    def _report(self, kind: str, sentence: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(sentence)

    @property
    def _sent_path(self) -> Path:
        return self._path.with_suffix(".sent")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened, without secrets and passwords in addresses."""
    lines = hiding_secrets()(str(error)).strip().splitlines() or [""]
    return re.sub(r"//[^/@\s]+@", f"//{MASK}@", lines[0])[:_MOST_CHARACTERS]


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _write_number(path: Path, number: int) -> None:
    # Of a fixed length, so that one system call replaces the whole file.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, f"{number:020d}\n".encode(), 0)
    finally:
        os.close(handle)
