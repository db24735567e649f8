"""Triggers: raised on one rank, seen by all at the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks

from phalanx.callbacks import Callback
from phalanx.framework.core.errors import DesyncError
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


@pytest.mark.parametrize("raising", [None, 1])
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


# At late steps, squares of them are more than a float64 holds exactly.
@pytest.mark.parametrize("steps", [(3, 4), (7, 0), (2**20 - 1, 2**20)])
def test_ranks_at_different_steps_are_reported(steps: tuple[int, int]) -> None:
    for message in run_on_ranks(2, out_of_step, steps):
        assert f"rank 1 is at {steps[1]}, rank 0 at {steps[0]}" in message
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


def test_a_stop_on_one_rank_stops_all_after_the_same_step() -> None:
    (first, mine), (second, other) = run_on_ranks(2, stopped, 1, 5)
    # Raised in step 5, agreed on with the reduction of step 6, which is completed.
    assert first == second == 7
    assert torch.equal(mine, other)


def test_one_process_stops_at_once() -> None:
    module = LocalMetric(0, 5)
    trainer = silent_trainer(max_epochs=3, callbacks=[StopInStep()])
    trainer.fit(module, loader(128, 4))
    assert trainer.global_step == 6
