"""Ranks that watch themselves learn from the store whether one is further behind than they are."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from phalanx.framework.at_work import AtWork
from phalanx.framework.heartbeat import LAST_BACKWARD, Heartbeat

AHEAD, BEHIND, BEHIND_AND_WAITS = (7, LAST_BACKWARD, 1), (7, 1, 0), (7, 1, 1)


class Rank:
    """What a rank does in each round, without its thread."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.watch = AtWork(rank, Heartbeat().read, lambda: False, 10.0)
        self.seen = ""

    def hears(self, *place: int) -> bool:
        """Pass a round at a place; return whether one further behind was heard of in it."""
        self.watch._rounds += 1
        self.watch._heard_at = -math.inf
        self.seen = self.watch._exchange(self.store, self.seen, place)
        return self.watch.hears_of_one_behind


def ranks(count: int) -> list[Rank]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [Rank(store, rank) for rank in range(count)]


def test_all_hear_of_the_one_that_is_furthest_behind() -> None:
    for places in ([AHEAD, BEHIND, BEHIND_AND_WAITS], [BEHIND_AND_WAITS, AHEAD, BEHIND], [BEHIND, AHEAD, AHEAD]):
        group = ranks(3)
        for _ in range(3):
            heard = [rank.hears(*place) for rank, place in zip(group, places, strict=True)]
        assert heard == [place != BEHIND for place in places]


def test_ranks_that_are_equally_far_hear_of_none() -> None:
    group = ranks(2)
    assert not any(rank.hears(*AHEAD) for _ in range(9) for rank in group)


def test_what_was_left_by_one_that_says_no_more_is_not_heard() -> None:
    one, other = ranks(2)
    for _ in range(3):
        one.hears(*BEHIND)
    # The first look finds it, and cannot tell how long it has lain there.
    assert [other.hears(*AHEAD) for _ in range(3)] == [False] * 3
    one.hears(*BEHIND)
    assert other.hears(*AHEAD)
    assert [other.hears(*AHEAD) for _ in range(3)] == [False] * 3


def test_a_rank_that_gets_on_is_soon_ahead() -> None:
    one, other = ranks(2)
    for _ in range(3):
        one.hears(*BEHIND)
        heard = other.hears(*AHEAD)
    assert heard
    one.seen = other.seen = ""
    for _ in range(3):
        one.hears(8, LAST_BACKWARD, 1)
        heard = other.hears(8, 0, 0)
    assert not heard
    assert one.hears(8, LAST_BACKWARD, 1)
