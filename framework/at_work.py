"""``AtWork``: ranks that no supervisor sees tell one another, on the store, which of them the others wait for.

A rank that waits is silent, and by itself cannot know whether others compute or are gone. So ranks that have been in
one step for a while leave word of it, again and again: the one that has come least far, and of several one that by its
stack does not wait. The others read that word, and leave it as it is while it is renewed. Who left it is under a watch
of its own, which ends it where it does not get on. Nothing is heard where a cable is cut, or whoever serves the store
is gone.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .heartbeat import Beat

_KEY = "phalanx/at_work"
_LONGEST_ROUND_SECONDS = 5.0
# Of a limit, so that whoever waits has heard of who is behind well before its own limit is over.
_ROUNDS_IN_LIMIT = 8
_HEARD_ROUNDS = 4
_JOIN_SECONDS = 0.5


class AtWork(threading.Thread):
    """Tells and hears in a thread of its own, where a store that does not answer is waited for by nobody else.

    Args:
        rank: this rank.
        read: gives what it has noted last.
        waits: whether it waits for another one, as far as its stack tells.
        limit: the shortest limit of silence that was given, in seconds; infinite where all are learned.
    """

    def __init__(self, rank: int, read: Callable[[], Beat], waits: Callable[[], bool], limit: float) -> None:
        super().__init__(name="phalanx-at-work", daemon=True)
        self._rank = rank
        self._read = read
        self._waits = waits
        self._seconds = min(_LONGEST_ROUND_SECONDS, limit / _ROUNDS_IN_LIMIT)
        self._rounds = 0
        self._heard_at = -math.inf
        """When a rank further behind was heard of last."""
        self._over = threading.Event()

    @property
    def hears_of_one_behind(self) -> bool:
        """Whether a rank that has come less far has lately told so."""
        # By the clock: the thread itself may wait for a store that is cut off.
        return time.monotonic() - self._heard_at < _HEARD_ROUNDS * self._seconds

    def stop(self) -> None:
        """End the thread; one that a store keeps waiting is left to it."""
        self._over.set()
        self.join(_JOIN_SECONDS)

    def run(self) -> None:
        """Tell and hear while this rank stays where it is; a connection is made when that first happens."""
        store: Any = None
        before, seen = self._read(), ""
        with contextlib.suppress(dist.DistError, RuntimeError, OSError, ValueError):
            while not self._over.wait(self._seconds):
                self._rounds += 1
                beat = self._read()
                stays, is_silent, before = beat.number == before.number, beat == before, beat
                if not stays or not dist.is_initialized():
                    self._heard_at, seen = -math.inf, ""
                    continue
                if store is None:
                    # Private, but what torch's own checkpoints and sharding go through.
                    store = dist.distributed_c10d._get_default_store()
                    # Whoever waits on the shared connection holds it. Before torch 2.8 there is no other.
                    store = store.clone() if hasattr(store, "clone") else store
                seen = self._exchange(store, seen, (*beat.place, int(is_silent and self._waits())))

    def _exchange(self, store: Any, seen: str, place: tuple[int, ...]) -> str:
        """Leave word of this rank's place, unless one further behind keeps its own there; return what is there now."""
        own = " ".join(map(str, (*place, self._rank, self._rounds)))
        found: str = store.compare_set(_KEY, seen, own).decode()
        if found == own:
            return own
        if _place(found) < place:
            # What is found first may have lain there for long.
            self._heard_at = time.monotonic() if seen else -math.inf
            return found
        store.set(_KEY, own)
        return own


def _place(word: str) -> tuple[int, ...]:
    return tuple(map(int, word.split()[:3]))
