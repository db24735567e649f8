"""``AtWork``: ranks that no supervisor sees tell one another, on the store, which of them the others wait for.

A rank that waits is silent, and by itself cannot know whether others compute or are gone. So ranks that have been in
one step for a while leave word of it, again and again: the one that has come least far, and of several one that by its
stack does not wait. All others read that word, also those that are as far, and leave it as it is while it is renewed.
Who left it is under a watch of its own, which ends it where it does not get on. Nothing is heard where a cable is cut,
or whoever serves the store is gone.
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
from .heartbeat import OUTSIDE, Beat

_KEY = "phalanx/at_work"
_SHORTEST_ROUND_SECONDS, _LONGEST_ROUND_SECONDS = 0.1, 5.0
# Of a limit, so that whoever waits has heard of who is behind well before its own limit is over.
_ROUNDS_IN_LIMIT = 8
_HEARD_ROUNDS = 4
# Between two looks in turn there may be no renewal, if it comes before the one and after the next.
_KEPT_ROUNDS = 2
_JOIN_SECONDS = 0.5


class AtWork(threading.Thread):
    """Tells and hears in a thread of its own, where a store that does not answer is waited for by nobody else.

    Args:
        rank: this rank.
        stage: how many stages it has entered together with others; ranks count their places anew in each.
        read: gives what it has noted last.
        waits: whether it waits for another one, as far as its stack tells.
        limit: the shortest limit of silence that was given, in seconds; infinite where all are learned.
        clock: the seconds in which this process was there to hear. What was heard ages by it, also while the thread
            waits for a store that is cut off.
    """

    def __init__(
        self,
        rank: int,
        stage: int,
        read: Callable[[], Beat],
        waits: Callable[[], bool],
        limit: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(name="phalanx-at-work", daemon=True)
        self._rank = rank
        self._stage = stage
        self._read = read
        self._waits = waits
        self._seconds = min(_LONGEST_ROUND_SECONDS, max(_SHORTEST_ROUND_SECONDS, limit / _ROUNDS_IN_LIMIT))
        self._rounds = self._age = 0
        self._clock = clock
        self._heard_at = -math.inf
        """When a rank further behind was heard of last."""
        self._over = threading.Event()

    @property
    def hears_of_one_behind(self) -> bool:
        """Whether a rank that has come less far has lately told so."""
        return self._clock() - self._heard_at < _HEARD_ROUNDS * self._seconds

    def say_no_more(self) -> None:
        """Have the thread end, soon."""
        self._over.set()

    def stop(self) -> None:
        """End the thread; one that a store keeps waiting is left to it."""
        self.say_no_more()
        self.join(_JOIN_SECONDS)

    def run(self) -> None:
        """Tell and hear while this rank stays where it is; a connection is made when that first happens."""
        store: Any = None
        before, seen = self._read(), ""
        with contextlib.suppress(dist.DistError, RuntimeError, OSError, ValueError):
            # Ranks begin together, and are not all to ask in the same moment.
            self._over.wait(random.Random(self._rank).uniform(0.0, self._seconds))
            while not self._over.wait(self._seconds):
                self._rounds += 1
                beat = self._read()
                stays, is_silent, before = beat.number == before.number, beat == before, beat
                if not stays or beat.section == OUTSIDE or not dist.is_initialized():
                    self._heard_at, seen = -math.inf, ""
                    continue
                if store is None:
                    store = shared_store()
                    # Whoever waits on the shared connection holds it. Before torch 2.8 there is no other.
                    store = store.clone() if hasattr(store, "clone") else store
                place = (self._stage, *beat.place, int(is_silent and self._waits()))
                seen = self._exchange(store, seen, place)

    def _exchange(self, store: Any, seen: str, place: tuple[int, ...]) -> str:
        """Leave word of this rank's place, unless one no further keeps its own there; return what is there now."""
        own = " ".join(map(str, (*place, self._rank, self._rounds)))
        found: str = (store.get(_KEY) if seen else store.compare_set(_KEY, "", own)).decode()
        self._age = self._age + 1 if found == seen else 0
        while found != own and not self._is_kept(found, place):
            self._age = 0
            found = store.compare_set(_KEY, found, own).decode()
        # What is found first may have lain there for long.
        if seen and self._age == 0 and _place(found) < place:
            self._heard_at = self._clock()
        return found

    def _is_kept(self, word: str, place: tuple[int, ...]) -> bool:
        """Whether a word is that of another rank, no further than this one, which goes on renewing it."""
        is_own = int(word.split()[-2]) == self._rank
        return not is_own and _place(word) <= place and self._age < _KEPT_ROUNDS


def _place(word: str) -> tuple[int, ...]:
    return tuple(map(int, word.split()[:-2]))
