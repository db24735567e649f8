"""Ranks without a supervisor learn through the store whether another one is further behind."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch.distributed as dist
from ranks import run_on_ranks

from phalanx.framework.watchdog.heartbeat import LAST_BACKWARD, Heartbeat, resolve_stall_timeout
from phalanx.framework.watchdog.in_process_watchdog import PeerProgress

# Stage, section, phase, and whether the rank waits.
AHEAD, BEHIND, BEHIND_AND_WAITS = (0, 7, LAST_BACKWARD, 1), (0, 7, 1, 0), (0, 7, 1, 1)
LIMIT = 4.0


class Rank:
    """The work of a rank in each round, without its thread."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.now = 0.0
        self.watch = PeerProgress(rank, 0, Heartbeat().read, lambda: False, LIMIT, lambda: self.now)
        self.seen = ""

    def hears(self, *position: int) -> bool:
        """Take part in a round at a position; return whether a rank further behind was heard of in it."""
        self.watch._rounds += 1
        self.watch._received_at = -math.inf
        self.seen = self.watch._exchange(self.store, self.seen, position)
        return self.watch.peer_is_behind


def ranks(count: int) -> list[Rank]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [Rank(store, rank) for rank in range(count)]


def test_all_ranks_hear_of_the_one_furthest_behind() -> None:
    for places in ([AHEAD, BEHIND, BEHIND_AND_WAITS], [BEHIND_AND_WAITS, AHEAD, BEHIND], [BEHIND, AHEAD, AHEAD]):
        group = ranks(3)
        for _ in range(3):
            heard = [rank.hears(*place) for rank, place in zip(group, places, strict=True)]
        assert heard == [place != BEHIND for place in places]


def test_many_ranks_that_read_at_the_same_moment_all_hear_of_it() -> None:
    group, rounds = ranks(48), 8
    together, heard = threading.Barrier(len(group)), [0] * len(group)

    def wait(number: int) -> None:
        for _ in range(rounds):
            together.wait(30.0)
            heard[number] += group[number].hears(*(AHEAD if number else BEHIND))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == 0
    # The first two rounds show which rank is alive, and in every other one the entry may be renewed after the read.
    assert min(heard[1:]) >= 3


def test_ranks_with_equal_progress_hear_of_none() -> None:
    group = ranks(2)
    assert not any(rank.hears(*AHEAD) for _ in range(9) for rank in group)


def test_the_entry_of_a_rank_that_stopped_publishing_does_not_count() -> None:
    one, other = ranks(2)
    for _ in range(3):
        one.hears(*BEHIND)
    # The first read finds the entry, of unknown age.
    assert [other.hears(*AHEAD) for _ in range(3)] == [False] * 3
    one.hears(*BEHIND)
    assert other.hears(*AHEAD)
    assert [other.hears(*AHEAD) for _ in range(3)] == [False] * 3


def test_a_rank_in_an_earlier_stage_is_behind_whatever_its_position_there() -> None:
    one, other = ranks(2)
    for _ in range(3):
        one.hears(0, 5003, 1, 1)
        heard = other.hears(1, 2, 0, 0)
    assert heard


def test_a_rank_that_makes_progress_is_soon_ahead() -> None:
    one, other = ranks(2)
    for _ in range(3):
        one.hears(*BEHIND)
        heard = other.hears(*AHEAD)
    assert heard
    one.seen = other.seen = ""
    for _ in range(3):
        one.hears(0, 8, LAST_BACKWARD, 1)
        heard = other.hears(0, 8, 0, 0)
    assert not heard
    assert one.hears(0, 8, LAST_BACKWARD, 1)


def test_an_entry_counts_for_half_of_a_limit() -> None:
    one, other = ranks(2)
    for _ in range(3):
        one.hears(*BEHIND)
        other.hears(*AHEAD)
    other.now += LIMIT / 2 - 0.1
    assert other.watch.peer_is_behind
    other.now += 0.2
    assert not other.watch.peer_is_behind


def hear_until_the_peer_stops() -> None:
    """Wait, on rank 0, for a rank that is at work and then stops publishing; through torch's store, in threads."""
    rank = dist.get_rank()
    heartbeat = Heartbeat()
    heartbeat.begin(resolve_stall_timeout(LIMIT))
    heartbeat.step()
    heartbeat.phase[0] = 0 if rank else LAST_BACKWARD
    watch = PeerProgress(rank, 0, heartbeat.read, lambda: rank == 0, 0.8, time.monotonic)
    watch.start()
    until = time.monotonic() + 20.0
    while rank == 0 and not watch.peer_is_behind:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert not (rank and watch.peer_is_behind)
    dist.barrier()
    if rank:
        watch.stop()
        assert not watch.is_alive()
    dist.barrier()
    while watch.peer_is_behind:
        assert time.monotonic() < until
        time.sleep(0.02)
    watch.stop()
    assert not watch.is_alive()


def test_a_rank_that_has_ended_does_not_count() -> None:
    run_on_ranks(2, hear_until_the_peer_stops)
