"""Ranks that wait for one that never comes are ended before any limit passes, where the supervisor knows of it."""

from __future__ import annotations

import dataclasses

import pytest
from model_script import MODEL
from ranks import run_script
from simulated_ranks import AT_WORK, WAITING, SimulatedRanks, record

from phalanx.framework.watchdog import waiting_ranks
from phalanx.framework.watchdog.heartbeat import HeartbeatRecord
from phalanx.framework.watchdog.silence import FIRST_SECONDS
from phalanx.framework.watchdog.stack_dump import Stacks
from phalanx.framework.watchdog.waiting_ranks import ENDED_SECONDS, SIGNAL_SECONDS, WaitingRanks

INSIDE = record(7, "epoch")


def message_of(
    monkeypatch: pytest.MonkeyPatch,
    stacks: list[Stacks],
    seconds: float,
    inside: HeartbeatRecord | None = INSIDE,
    ended: tuple[int, ...] = (),
    has_signal: bool = False,
    cpu: float = 0.0,
) -> str:
    """Return the last line of the message about ranks in one state for ``seconds``; empty if there is none."""
    now = [0.0]
    monkeypatch.setattr(waiting_ranks, "work_seconds", lambda pid: cpu * now[0])
    given = SimulatedRanks(dict.fromkeys(range(len(stacks)), inside), {n: [each] for n, each in enumerate(stacks)})
    ranks = WaitingRanks(given, clock=lambda: now[0])
    running = {rank: 10 + rank for rank in range(len(stacks)) if rank not in ended}
    while now[0] < seconds:
        stall = ranks.check(running, {rank: 10 + rank for rank in ended}, has_signal)
        if stall is not None:
            assert stall.ranks == tuple(running)
            return stall.message.splitlines()[-1]
        now[0] += 0.5
    return ""


def test_a_rank_that_waits_for_one_that_has_ended_ends_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    message = message_of(monkeypatch, [WAITING, WAITING], ENDED_SECONDS + 1, ended=(1,))
    assert message.startswith("rank 1 (pid 11) has ended with exit code 0, and rank 0 (pid 10) waits for it in the")
    assert message_of(monkeypatch, [WAITING, WAITING], ENDED_SECONDS - 1, ended=(1,)) == ""
    three = message_of(monkeypatch, [WAITING] * 3, ENDED_SECONDS + 1, ended=(1, 2))
    assert three.startswith("ranks 1, 2 have ended with exit code 0, and rank 0 (pid 10) waits")


def test_ranks_that_wait_for_one_another_are_ended_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    message = message_of(monkeypatch, [WAITING, WAITING], SIGNAL_SECONDS + 1, has_signal=True)
    assert message.startswith("ended by a signal: ranks 0, 1 wait for another rank in the section 'epoch'")
    assert message_of(monkeypatch, [WAITING, WAITING], SIGNAL_SECONDS - 1, has_signal=True) == ""
    assert message_of(monkeypatch, [WAITING, WAITING], 3 * SIGNAL_SECONDS) == ""


@pytest.mark.parametrize("ended", [(), (1,)])
def test_ranks_that_may_still_end_by_themselves_are_left(
    monkeypatch: pytest.MonkeyPatch, ended: tuple[int, ...]
) -> None:
    outside = dataclasses.replace(INSIDE, section=0)
    long = 3 * SIGNAL_SECONDS
    assert message_of(monkeypatch, [AT_WORK, WAITING], long, ended=ended, has_signal=True) == ""
    assert message_of(monkeypatch, [WAITING, WAITING], long, ended=ended, has_signal=True, cpu=0.9) == ""
    for where in (outside, None):
        assert message_of(monkeypatch, [WAITING, WAITING], long, where, ended, has_signal=True) == ""


def test_a_learned_limit_passes_before_a_collective_fails_with_an_error_that_names_no_rank() -> None:
    from torch.distributed.constants import default_pg_timeout

    assert default_pg_timeout.total_seconds() > FIRST_SECONDS + 60


SCRIPT = f"""{MODEL}
class Evaluated(Model):
    def validation_step(self, batch, index):
        self.log("val", self.net(batch[0]).mean())

if __name__ == "__main__":
    trainer = Trainer(strategy="ddp", devices=2, accelerator="cpu", max_steps=2, **quiet)
    data, model = loader(32, 2), Evaluated()
    trainer.fit(model, data)
    if trainer.is_global_zero:
        trainer.validate(model, data)
"""


def test_a_rank_that_evaluates_alone_ends_with_the_name_of_the_ended_one() -> None:
    done = run_script(SCRIPT, timeout=60.0)
    assert done.returncode == 76, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("rank 1 (pid ")
    assert "has ended with exit code 0, and rank 0 (pid " in last
