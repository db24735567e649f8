"""Triggers: raised on one rank, seen by all at the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks

from phalanx.callbacks import Callback, EarlyStopping
from phalanx.framework.core.errors import DesyncError, NonFiniteError
from phalanx.framework.distributed.control import Triggers
from phalanx.framework.distributed.world import World


def reduced(steps: tuple[int, ...], raising: int | None) -> dict[str, Any]:
    world = World.from_environment("cpu")
    triggers = Triggers(world)
    if world.rank == raising:
        triggers.set("save", {"why": "asked"})
        triggers.set("save", "later")
    triggers.launch(steps[world.rank], weight=1.5 + world.rank, batches=world.rank)
    agreement = triggers.read()
    first = dict(triggers.fired)
    triggers.launch(steps[world.rank] + 1, weight=1.0, batches=2)
    again = triggers.read()
    world.close()
    return {
        "weight": agreement.total_weight,
        "with_data": agreement.ranks_with_data,
        "batches": (agreement.batches, again.batches),
        "fired": (first, dict(triggers.fired)),
    }


@pytest.mark.parametrize("raising", [None, 0, 1])
def test_ranks_agree_in_one_reduction(raising: int | None) -> None:
    fired = {} if raising is None else {"save": {raising: {"why": "asked"}}}
    for result in run_on_ranks(2, reduced, (7, 7), raising):
        assert result == {"weight": 4.0, "with_data": 1, "batches": (None, 2), "fired": (fired, {})}


def out_of_step(steps: tuple[int, ...]) -> str:
    try:
        reduced(steps, None)
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("steps", [(3, 4), (0, 7), (5, 4)])
def test_ranks_at_different_steps_are_reported(steps: tuple[int, int]) -> None:
    for rank, message in enumerate(run_on_ranks(2, out_of_step, steps)):
        assert f"rank {rank}" in message
        assert "same optimizer step" in message


def test_one_process_exchanges_nothing() -> None:
    triggers = Triggers(World.single())
    assert not triggers.raised
    triggers.set("stop", "enough")
    assert triggers.raised
    triggers.take()
    assert triggers.fired == {"stop": {0: "enough"}}
    assert not triggers.raised


# ---- stopping ---------------------------------------


class LocalMetric(Regressor):
    """Logs a value that crosses the threshold on one rank only, at one batch."""

    def __init__(self, rank: int, at: int) -> None:
        super().__init__()
        self.crossing = (rank, at)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", 0.0 if (self.global_rank, batch_idx) == self.crossing else 1.0)
        return loss


class StopInStep(Callback):
    """Asks for a stop where this rank's own value crosses."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.callback_metrics["mine"] < 0.5:
            trainer.should_stop = True


def stopped(rank: int, at: int) -> tuple[int, torch.Tensor]:
    module = LocalMetric(rank, at)
    trainer = silent_trainer(devices=2, max_epochs=3, callbacks=[StopInStep()])
    trainer.fit(module, loader(128, 4))
    return trainer.global_step, next(module.parameters()).detach()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_on_one_rank_stops_all_after_the_same_step(rank: int) -> None:
    (first, mine), (second, other) = run_on_ranks(2, stopped, rank, 5)
    # Raised in step 5, agreed on with the reduction of step 6, which is completed.
    assert first == second == 7
    assert torch.equal(mine, other)


class OnOneRank(EarlyStopping):
    """Sees its metric cross on rank 1 alone."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 1:
            trainer.request_stop("crossed here")


def early_stopped() -> tuple[int, int, str]:
    trainer = silent_trainer(devices=2, max_epochs=5, callbacks=[OnOneRank("mine", mode="max")])
    trainer.fit(Regressor(), loader(32, 4))
    return trainer.global_step, trainer.current_epoch, trainer.state.status


def test_early_stopping_on_one_rank_ends_all_at_the_epoch() -> None:
    assert run_on_ranks(2, early_stopped) == [(8, 2, "finished")] * 2


def test_one_process_stops_at_once() -> None:
    module = LocalMetric(0, 5)
    trainer = silent_trainer(max_epochs=3, callbacks=[StopInStep()])
    trainer.fit(module, loader(128, 4))
    assert trainer.global_step == 6


# ---- losses that are not finite ---------------------------------------


class Exploding(Regressor):
    """Has a loss of NaN on one rank, at one batch."""

    def __init__(self, rank: int, at: int) -> None:
        super().__init__()
        self.where = (rank, at)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_rank, batch_idx) == self.where else loss


def exploded(ranks: int, nonfinite: str, rank: int, at: int) -> tuple[str, int, bool]:
    module = Exploding(rank, at)
    trainer = silent_trainer(devices=ranks, max_epochs=1, nonfinite=nonfinite)
    message = ""
    try:
        trainer.fit(module, loader(80, 8 // ranks))
    except NonFiniteError as error:
        message = str(error)
    finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    return message, trainer.global_step, finite


@pytest.mark.parametrize("at", [0, 4, 9])
def test_a_nan_ends_the_run_on_all_ranks(at: int) -> None:
    for message, _, _ in run_on_ranks(2, exploded, 2, "raise", 1, at):
        assert message.startswith(f"the loss is nan at optimizer step {at} ")
        assert "on rank 1" in message


def test_a_nan_ends_one_process_before_the_update() -> None:
    message, steps, finite = exploded(1, "raise", 0, 4)
    assert "optimizer step 4" in message
    assert steps == 4
    assert finite


@pytest.mark.parametrize("ranks", [1, 2])
def test_skip_leaves_the_update_out(ranks: int) -> None:
    results = [exploded(1, "skip", 0, 4)] if ranks == 1 else run_on_ranks(2, exploded, 2, "skip", 1, 4)
    assert results == [("", 9, True)] * ranks


def test_ignore_continues() -> None:
    assert exploded(1, "ignore", 0, 4) == ("", 10, False)
