"""In-process stall watchdog, used if phalanx did not launch the ranks: one process, torchrun, SLURM, MPI.

A thread checks this process's own heartbeat, and reads from the store whether another rank is further behind. It does
not detect a process that is stopped, and cannot run while another thread holds the interpreter's lock. In a script a
stall ends the process with exit code 76. In a notebook, an interpreter or a test the stall is reported once on
standard error, and the process continues.

A rank that waits shows no heartbeat, and does not know whether the others are computing or have ended. So each rank
that has been in one step for a while publishes its position repeatedly under one key. The rank with the least progress
replaces the entry; among several such ranks it is one that, judged by its stack, does not wait. Ranks with as much
progress leave the entry alone as long as it is renewed, so the traffic grows with their number by only one read each.
The rank that published the entry watches itself, and ends if it stalls. No entries arrive if the network is cut or the
process that serves the store has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..core.errors import StalledError
from ..distributed.rendezvous import shared_store
from ..system.entry_script import can_rerun_script
from ..system.environment import error_dir
from ..system.launcher_env import Placement
from .heartbeat import LEARNED, OUTSIDE, SECTIONS, Heartbeat, HeartbeatRecord
from .stack_dump import Stacks, parse_stacks
from .stall_detector import StallDetector

_KEY = "phalanx/at_work"
_SHORTEST_ROUND_SECONDS, _LONGEST_ROUND_SECONDS = 0.1, 5.0
# Rounds per limit: a waiting rank must receive the entry of the rank behind well before its own limit is over.
_ROUNDS_IN_LIMIT = 8
_VALID_ROUNDS = 4
# An entry may seem unchanged in one round, if it is renewed just before one read and just after the next.
_RENEWED_ROUNDS = 2
_JOIN_SECONDS = 0.5


class PeerProgress(threading.Thread):
    """Publishes through the store the rank that is furthest behind, for ranks without a supervisor.

    It publishes and reads in a separate thread, so that a store that does not answer blocks nothing else.

    Args:
        rank: this rank.
        stage: the number of stages that this rank has entered together with others; positions start at zero in each.
        read: returns this rank's latest heartbeat record.
        waits: whether this rank waits for another rank, judged by its stack.
        limit: the shortest limit of silence that the user gave, in seconds; infinite if all limits are learned.
        clock: seconds during which this process was running. The age of received entries is measured with it, also
            while the thread waits for a store that is unreachable.
    """

    def __init__(
        self,
        rank: int,
        stage: int,
        read: Callable[[], HeartbeatRecord],
        waits: Callable[[], bool],
        limit: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(name="phalanx-peer-progress", daemon=True)
        self._rank = rank
        self._stage = stage
        self._read = read
        self._waits = waits
        self._seconds = min(_LONGEST_ROUND_SECONDS, max(_SHORTEST_ROUND_SECONDS, limit / _ROUNDS_IN_LIMIT))
        self._rounds = self._age = 0
        self._clock = clock
        self._received_at = -math.inf
        """The time at which an entry of a rank further behind was last seen to be renewed."""
        self._stopped = threading.Event()

    @property
    def peer_is_behind(self) -> bool:
        """Whether a rank with less progress has recently published its position."""
        return self._clock() - self._received_at < _VALID_ROUNDS * self._seconds

    def request_stop(self) -> None:
        """Request the end of the thread."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread. A thread that waits for a store is abandoned."""
        self.request_stop()
        self.join(_JOIN_SECONDS)

    def run(self) -> None:
        """Publish and read while this rank stays in one step; connect to the store when this happens first."""
        store: Any = None
        before, seen = self._read(), ""
        with contextlib.suppress(dist.DistError, RuntimeError, OSError, ValueError):
            # Ranks start at the same moment; their requests are spread over a round.
            self._stopped.wait(random.Random(self._rank).uniform(0.0, self._seconds))
            while not self._stopped.wait(self._seconds):
                self._rounds += 1
                record = self._read()
                stays, is_silent, before = record.number == before.number, record == before, record
                if not stays or record.section == OUTSIDE or not dist.is_initialized():
                    self._received_at, seen = -math.inf, ""
                    continue
                if store is None:
                    # A rank that waits on the shared connection blocks it.
                    store = shared_store().clone()
                position = (self._stage, *record.progress, int(is_silent and self._waits()))
                seen = self._exchange(store, seen, position)

    def _exchange(self, store: Any, seen: str, position: tuple[int, ...]) -> str:
        """Publish this position unless a rank without more progress renews the entry; return the entry."""
        own = " ".join(map(str, (*position, self._rank, self._rounds)))
        found: str = (store.get(_KEY) if seen else store.compare_set(_KEY, "", own)).decode()
        self._age = self._age + 1 if found == seen else 0
        while found != own and not self._is_renewed(found, position):
            self._age = 0
            found = store.compare_set(_KEY, found, own).decode()
        # The entry of the first read may be old: only a later change shows that its rank is alive.
        if seen and self._age == 0 and _position(found) < position:
            self._received_at = self._clock()
        return found

    def _is_renewed(self, entry: str, position: tuple[int, ...]) -> bool:
        """Whether an entry belongs to another rank without more progress than this one, which renews it."""
        is_own = int(entry.split()[-2]) == self._rank
        return not is_own and _position(entry) <= position and self._age < _RENEWED_ROUNDS


def _position(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split()[:-2]))


CHECK_SECONDS = 0.25
_stages = itertools.count()


def _nothing(message: str, ends: bool) -> None:
    """Do nothing about a stall."""


@contextmanager
def watched(
    heartbeat: Heartbeat,
    placement: Placement,
    limits: tuple[float, ...],
    on_stall: Callable[[str, bool], None] = _nothing,
) -> Generator[None, None, None]:
    """Watch a stage for stalls, through the supervisor if there is one, else through a thread of this process.

    Args:
        heartbeat: the heartbeat of this rank.
        placement: the place of this rank.
        limits: the limit of each section in seconds.
        on_stall: called in that thread with the message of a stall, and whether it ends this process.
    """
    directory = error_dir()
    shared = directory is not None and os.path.isdir(directory) and heartbeat.share(directory, placement.rank)
    heartbeat.begin(limits)
    has_limit = any(limit < math.inf for limit in limits[1:])
    watchdog = InProcessWatchdog(heartbeat, placement, limits, on_stall) if has_limit and not shared else None
    if watchdog is not None:
        watchdog.start()
    try:
        yield
    finally:
        if watchdog is not None:
            watchdog.stop()
        heartbeat.enter(SECTIONS[0])


class InProcessWatchdog(threading.Thread):
    """Checks this process's own heartbeat until it is stopped."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        placement: Placement,
        limits: tuple[float, ...],
        on_stall: Callable[[str, bool], None] = _nothing,
    ) -> None:
        super().__init__(name="phalanx-stalls", daemon=True)
        self._on_stall = on_stall
        self._placement = placement
        self._heartbeat = heartbeat
        self._detector = StallDetector(self)
        self._peers = PeerProgress(
            placement.rank,
            next(_stages) if placement.size > 1 else 0,
            read=heartbeat.read,
            waits=lambda: self._own_stacks().waits,
            limit=min(limit for limit in (*limits[1:], math.inf) if limit != LEARNED),
            clock=lambda: self._detector.now,
        )
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self:
            self.join()
        if self._peers.is_alive():
            self._peers.stop()

    def run(self) -> None:
        """Check at intervals; the thread ends after it has reported a stall."""
        if self._placement.size > 1:
            self._peers.start()
        try:
            while not self._stopped.wait(CHECK_SECONDS):
                if stall := self._detector.check({self._placement.rank: os.getpid()}):
                    self._report(stall.message)
                    return
        except BaseException:
            # Without this watchdog the rank must not be published as working: the others would wait forever.
            self._peers.request_stop()
            raise

    def records(self, pids: Mapping[int, int]) -> dict[int, HeartbeatRecord | None]:
        """Return this process's latest record."""
        return {self._placement.rank: self._heartbeat.read()}

    def stacks(self, pids: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None]) -> dict[int, Stacks]:
        """Return this process's stacks."""
        return {self._placement.rank: self._own_stacks()}

    def another_is_behind(self) -> bool:
        """Whether a rank with less progress has published that it is working."""
        return self._peers.peer_is_behind

    def _own_stacks(self) -> Stacks:
        text = ""
        # The file cannot be written on a full disk.
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
        return parse_stacks(text, threading.main_thread().ident or 0)

    def _report(self, message: str) -> None:
        stream = sys.__stderr__ or sys.stderr
        ends = can_rerun_script() or self._placement.launcher is not None
        shown = message
        with contextlib.suppress(BaseException):
            if self._placement.launcher is not None:
                shown = "\n".join(f"[rank {self._placement.rank}] {line}" for line in message.splitlines())
            stream.write(shown + "\n")
            stream.flush()
        with contextlib.suppress(Exception):
            self._on_stall(message, ends)
        if ends and not self._stopped.is_set():
            os._exit(StalledError.exit_code)
