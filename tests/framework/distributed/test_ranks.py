"""The helper that runs tests on several ranks, for what tests rely on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks, run_script

from phalanx.framework.distributed.world import World


@dataclass
class Answer:
    rank: int
    total: float


def sum_of_ranks(offset: int) -> Answer:
    world = World.from_environment("cpu")
    return Answer(world.rank, world.all_reduce(torch.tensor(float(world.rank + offset))).item())


def fail_on_last_rank() -> None:
    world = World.from_environment("cpu")
    if world.rank == world.size - 1:
        raise ValueError("the last rank has had enough")
    world.barrier()


def die_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_for_ever() -> None:
    time.sleep(3600)


def hang_after_signals_were_handled() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.signal(number, signal.SIG_IGN))
    time.sleep(3600)


def leave_a_thread() -> None:
    threading.Thread(target=sleep_for_ever, name="forgotten", daemon=True).start()


def leave_groups() -> int:
    World.from_environment("cpu").barrier()
    return os.getpid()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_results_come_in_rank_order(num_ranks: int) -> None:
    total = float(sum(range(num_ranks)) + 5 * num_ranks)
    assert run_on_ranks(num_ranks, sum_of_ranks, 5) == [Answer(rank, total) for rank in range(num_ranks)]


def test_ranks_stay_warm_between_calls() -> None:
    assert run_on_ranks(2, leave_groups) == run_on_ranks(2, leave_groups)


@pytest.mark.parametrize(
    ("function", "timeout", "message"),
    [
        (fail_on_last_rank, 30.0, "the last rank has had enough"),
        (die_on_last_rank, 30.0, "rank 1 died: killed by SIGKILL"),
        (sleep_for_ever, 1.0, "in sleep_for_ever"),
        (hang_after_signals_were_handled, 1.0, "in hang_after_signals_were_handled"),
        (leave_a_thread, 30.0, "threads behind: .*forgotten"),
    ],
)
def test_a_failure_tells_why_and_the_next_call_gets_fresh_ranks(
    function: Callable[[], None], timeout: float, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_on_ranks(2, function, timeout=timeout)


def test_a_script_that_hangs_is_ended_with_all_it_started() -> None:
    source = (
        "import subprocess, time\nprint('started', flush=True)\nsubprocess.Popen(['sleep', '3600'])\ntime.sleep(3600)"
    )
    with pytest.raises(AssertionError, match="started"):
        run_script(source, timeout=1.0)
