"""``Delivery``: the records of a run for a remote store, in a file, and the thread that passes them on."""

from __future__ import annotations

import atexit
import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from ..framework.metrics.json_lines import JsonLines, read_lines
from ..framework.system.environment import hiding_secrets
from ..framework.system.redaction import MASK

Record = dict[str, Any]

_MEDIA = "media:"
# Numbers that JSON lacks, as JsonLines writes them.
_NOT_FINITE = {"nan", "inf", "-inf"}
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
    """A remote store of one run. All methods are called in the thread of a ``Delivery``."""

    batch_records = 1
    """The largest number of records in a call of ``deliver``."""

    @abstractmethod
    def connect(self, records: Iterator[Record]) -> int:
        """Open the run, which is continued if the store has it, and return how many of the records so far it has."""

    @abstractmethod
    def deliver(self, first: int, records: Sequence[Record]) -> None:
        """Store records, the first of which is number ``first``.

        Raises:
            Refused: one of them is not accepted.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run with ``"success"``, ``"failed"`` or ``"interrupted"``."""


class Delivery:
    """A file of records, one JSON object a line, and a thread that delivers them to a store in order.

    A record has one key beside ``step`` and ``time`` that says what it is: ``metrics`` maps names to numbers,
    ``hparams`` holds hyperparameters, ``media`` a media item, and ``model`` a checkpoint.

    The file is the queue: the memory in use does not grow while the store cannot be reached. A failure is reported
    once and repeated with growing pauses; a record that the store refuses is left out with a report.

    A remote store cannot drop points. A run that resumes therefore leaves the points after its checkpoint in the file,
    and ``add_metrics`` and ``add_media`` skip them when the run records them again.

    Args:
        path: the file; its directory must exist when the first record is added.
        name: that of the logger, for messages.
        say: called with a sentence for the console.
        at_exit: called at the end of a program that has not called ``finish``.
    """

    def __init__(self, path: Path, name: str, say: Callable[[str], None], at_exit: Callable[[], object]) -> None:
        self.path = path
        self._name = name
        self._say = say
        self._at_exit = at_exit
        self._lines = JsonLines(path)
        self._repeats: Counter[tuple[int, str]] = Counter()
        # Metrics arrive in the logger's thread, checkpoints in the training thread.
        self._lock = Lock()
        self._store: Store | None = None
        self._thread: Thread | None = None
        self._delivered = 0
        self._position = 0
        self._connected = Event()
        self._wake = Event()
        self._status: str | None = None
        self._failing = False
        self._abandoned = False
        self._reported: set[str] = set()

    # ---- the file ---------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The size of the file in bytes, the position after all records."""
        with self._lock:
            return self._lines.size

    def resume(self, position: int | None, step: int) -> None:
        """Skip the points that are in the file already when they are recorded again.

        Args:
            position: the size of the file at the checkpoint; ``None`` if it is unknown.
            step: the checkpoint's number of optimizer steps, used without a ``position``.
        """
        repeats: Counter[tuple[int, str]] = Counter()
        for _, record in read_lines(self.path, position or 0):
            if position is not None or record.get("step", -1) >= step:
                repeats.update(_points(record))
        with self._lock:
            self._repeats = repeats

    def add_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics at a step, without those that the file holds from before the run resumed."""
        with self._lock:
            new = {key: value for key, value in metrics.items() if not self._is_repeat(step, key)}
            if new:
                self._lines.append({"step": step, "time": time.time(), "metrics": new})

    def add_media(self, media: Mapping[str, Any], step: int) -> None:
        """Record a media item at a step, unless the file holds it from before the run resumed."""
        with self._lock:
            if not self._is_repeat(step, _MEDIA + media["key"]):
                self._lines.append({"step": step, "time": time.time(), "media": media})

    def add(self, what: str, value: Mapping[str, Any]) -> None:
        """Record hyperparameters or a model."""
        with self._lock:
            self._lines.append({"time": time.time(), what: value})

    def _is_repeat(self, step: int, key: str) -> bool:
        if self._repeats[step, key] == 0:
            return False
        self._repeats[step, key] -= 1
        return True

    # ---- the thread -------------------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def start(self, store: Store) -> None:
        """Deliver to a store from now on."""
        self._store = store
        atexit.register(self._at_exit)
        # A daemon thread: a store that hangs must not keep the process from ending.
        self._thread = Thread(target=self._run, args=(store,), name=f"phalanx-{self._name}-delivery", daemon=True)
        self._thread.start()

    def connected(self, seconds: float) -> Store | None:
        """Wait until the store is connected, at most ``seconds``; return it, or None if it is not."""
        self._wake.set()
        return self._store if self._connected.wait(seconds) else None

    def finish(self, status: str, seconds: float) -> int:
        """Deliver the remaining records, close the store and the file, and end the thread.

        Waits at most ``seconds``, and a few seconds if the store could not be reached before.

        Returns:
            The number of records that are not delivered, all of them if nothing was started.
        """
        self._status = status
        self._wake.set()
        if self._thread is not None:
            atexit.unregister(self._at_exit)
            self._thread.join(min(seconds, _FAILING_SECONDS) if self._failing else seconds)
        # A thread that is late must not send what a later one sends.
        self._abandoned = True
        with self._lock:
            self._lines.close()
        return sum(1 for _ in read_lines(self.path, self._position))

    def _run(self, store: Store) -> None:
        pause = _PERIOD_SECONDS
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            finishing = self._status is not None
            try:
                self._send(store)
            except Exception as error:
                self._failing = True
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._report(
                    f"{self._name}: the server cannot be reached ({type(error).__name__}: {first_line(error)}); "
                    f"training continues, and the records are kept in {self.path} until it can.",
                    "failure",
                )
            else:
                self._failing = False
                pause = _PERIOD_SECONDS
            if finishing:
                break
        if self._connected.is_set() and self._status is not None:
            with contextlib.suppress(Exception):
                store.close(self._status)

    def _send(self, store: Store) -> None:
        if not self._connected.is_set():
            known = store.connect(record for _, record in read_lines(self.path))
            for position, _ in islice(read_lines(self.path), known):
                self._delivered += 1
                self._position = position
            # Functions run in reverse order: this one before that of W&B, which ends its service.
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
            self._connected.set()
        while not self._abandoned:
            batch = list(islice(read_lines(self.path, self._position), store.batch_records))
            if not batch:
                break
            records = [record for _, record in batch]
            try:
                store.deliver(self._delivered, records)
            except Refused:
                self._deliver_singly(store, records)
            self._delivered += len(batch)
            self._position = batch[-1][0]

    def _deliver_singly(self, store: Store, records: Sequence[Record]) -> None:
        for number, record in enumerate(records, self._delivered):
            try:
                store.deliver(number, [record])
            except Refused as error:
                self._report(f"{self._name} leaves out what was refused ({error}).", "refusal")

    def _report(self, sentence: str, kind: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(sentence)


def metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a record as numbers, which the file may hold as text."""
    metrics: dict[str, Any] = record["metrics"]
    return {key: float(value) if value in _NOT_FINITE else value for key, value in metrics.items()}


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened, without secrets and passwords in addresses."""
    lines = hiding_secrets()(str(error)).strip().splitlines() or [""]
    return re.sub(r"//[^/@\s]+@", f"//{MASK}@", lines[0])[:_MOST_CHARACTERS]


def _points(record: Mapping[str, Any]) -> list[tuple[int, str]]:
    if "metrics" in record:
        return [(record["step"], key) for key in record["metrics"]]
    return [(record["step"], _MEDIA + record["media"]["key"])] if "media" in record else []
