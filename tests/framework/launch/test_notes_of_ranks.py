"""What rank 0 tells of ranks that differ without failing: logged names, slow ranks, losses that jump."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from small_fits import capturing

from phalanx.framework.diagnostics.loss_checks import MAX_NOTES, WARM_UP, LossSpikes
from phalanx.framework.distributed.straggler import LASTING, Pace
from phalanx.framework.loop.window_batches import timed


class Logs(Regressor):
    """Logs for the epoch's end: another name on rank 1, or the same ones in another order and a step later."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        odd = self.global_rank == 1
        self.log("own step", 1.0) if odd else None
        names = ["a", "accuracy"]
        if self.names == "typo" and odd:
            names = ["a", "acuracy"]
        if self.names == "late" and odd:
            names = ["accuracy", "a"] if batch_idx else ["a"]
        for name in names:
            self.log(name, loss, on_step=False, on_epoch=True)
        return loss


def logged(names: str) -> list[str]:
    trainer = silent_trainer(devices=2, max_epochs=1)
    notes = capturing(trainer)
    try:
        trainer.fit(Logs(names), loader(48, 4))
    except Exception as error:
        notes.append(type(error).__name__)
    return [note for note in notes if "phalanx" not in note and "trained" not in note]


def test_different_names_of_metrics_are_reported_before_the_epoch_ends() -> None:
    notes, others = run_on_ranks(2, logged, "typo")
    assert notes == others
    told, end = notes
    assert told.startswith("Rank 1 has not logged 'accuracy' in this epoch, rank 0 has (optimizer step 2)")
    assert "Did you mean 'acuracy'?" in told
    assert end == "MetricError"


def test_names_that_follow_a_step_later_are_not_reported() -> None:
    assert run_on_ranks(2, logged, "late") == [[], []]


# ---- slow ranks -----------------------------------------------------------------------------------------------------


class Sleepy(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.03 if self.global_rank == 1 else 0.0)
        return super().training_step(batch, batch_idx)


def slept() -> list[str]:
    trainer = silent_trainer(devices=2, max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(Sleepy(), loader(8 * 2 * LASTING, 4))
    return [note for note in notes if "holds up" in note]


def test_a_slow_rank_is_reported_once_with_its_ratio() -> None:
    notes, others = run_on_ranks(2, slept)
    assert len(notes) == 1
    assert notes == others
    assert notes[0].startswith("Rank 1 holds up the others: without waiting for them it takes ")
    assert "times as long as the median rank" in notes[0]


@pytest.mark.parametrize(("times", "slow"), [([0.1] * 8, False), ([0.1] * 7 + [0.2], True), ([0.1, 0.12], False)])
def test_ranks_exchange_their_times_only_where_they_differ_for_long(times: list[float], slow: bool) -> None:
    pace = Pace()
    squares = sum(one * one for one in times)
    asked = [step for step in range(1000) if pace.differs(step, len(times), sum(times), squares)]
    # Rarely: pauses double.
    assert asked == ([LASTING - 1, LASTING + 199, LASTING + 599] if slow else [])
    assert (pace.straggler(times) is not None) == slow


def test_the_time_of_fetches_within_a_window_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def slow(count: int) -> Iterator[int]:
        nonlocal now
        for number in range(count):
            now += 0.25
            yield number

    pace = Pace()
    pace.updated()
    for _ in timed(slow(3), [pace.fetched]):
        # The rest of the pass may wait for other ranks.
        now += 8.0
    pace.updated()
    for seconds in (0.75, 0.0):
        now += 2.0
        pace.launched()
        now += 1.0
        pace.own = 0.0
        pace.arrived()
        assert pace.own == 3.0 + seconds
        pace.updated()


# ---- losses that jump -----------------------------------------------------------------------------------------------


def judged(losses: list[float]) -> list[int]:
    spikes = LossSpikes()
    return [number for number, loss in enumerate(losses) if spikes(loss, number)]


def test_a_spike_is_seen_and_noise_and_trends_are_not() -> None:
    draw = random.Random(0)
    falling = [4.0 * 0.99**step + 1.0 + draw.gauss(0.0, 0.1) for step in range(3000)]
    assert judged(falling) == []
    assert judged([2.0] * 200) == []
    falling[700] = falling[701] = 9.0
    falling[2000] = 9.0
    assert judged(falling) == [700, 2000]
    assert judged([8.0, *falling[:WARM_UP]]) == []


def test_a_new_level_is_reported_once_or_twice_and_then_is_normal() -> None:
    draw = random.Random(0)
    losses = [(1.0 if step < 500 else 5.0) + draw.gauss(0.0, 0.1) for step in range(3000)]
    told = judged(losses)
    assert told[0] == 500
    assert len(told) <= 3


def test_a_hard_batch_that_repeats_is_not_reported() -> None:
    """A loader of few batches, one of them hard, in a run that goes well."""
    draw = random.Random(0)
    spikes = LossSpikes()
    losses = [0.99**epoch * (0.5 if batch == 40 else 0.01) for epoch in range(60) for batch in range(64)]
    told = [step for step, loss in enumerate(losses) if spikes(loss + draw.gauss(0.0, 0.001), step % 64)]
    assert told == []
    # A batch that was easy until now is news.
    assert spikes(0.5, 41)


def test_a_run_reports_at_most_five_spikes() -> None:
    draw = random.Random(0)
    losses = [(9.0 if step % 500 == 499 else 1.0) + draw.gauss(0.0, 0.1) for step in range(40_000)]
    assert 2 <= len(judged(losses)) <= MAX_NOTES


def test_tiny_runs_are_not_judged() -> None:
    assert judged([1.0 + step % 3 * 0.1 for step in range(100)] + [100.0] + [1.0] * 50) == []
