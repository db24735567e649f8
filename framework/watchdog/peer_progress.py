"""``PeerProgress``: publishes through the store the rank that is furthest behind, for ranks without a supervisor.

A rank that waits shows no sign of life, and does not know whether the others are computing or have ended. So each rank
that has been in one step for a while publishes its position repeatedly under one key. The rank with the least progress
replaces the entry; among several such ranks it is one that, judged by its stack, does not wait. Ranks with as much
progress leave the entry alone as long as it is renewed, so the traffic grows with their number by only one read each.
The rank that published the entry watches itself, and ends if it stalls. No entries arrive if the network is cut or the
process that serves the store has ended.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..distributed.rendezvous import shared_store
from .heartbeat import OUTSIDE, HeartbeatRecord

_KEY = "phalanx/at_work"
_SHORTEST_ROUND_SECONDS, _LONGEST_ROUND_SECONDS = 0.1, 5.0
# Rounds per limit: a waiting rank must receive the entry of the rank behind well before its own limit is over.
_ROUNDS_IN_LIMIT = 8
_VALID_ROUNDS = 4
# An entry may seem unchanged in one round, if it is renewed just before one read and just after the next.
_RENEWED_ROUNDS = 2
_JOIN_SECONDS = 0.5


class PeerProgress(threading.Thread):
    """Publishes and reads in a separate thread, so that a store that does not answer blocks nothing else.

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
                    store = shared_store()
                    # A rank that waits on the shared connection blocks it. Before torch 2.8 there is no other.
                    store = store.clone() if hasattr(store, "clone") else store
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
