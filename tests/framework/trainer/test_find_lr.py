"""The learning rate range test: its losses equal plain torch, all ranks agree, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, network, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader

from phalanx import Callback
from phalanx.framework.core.errors import ConfigurationError, PhalanxError
from phalanx.framework.trainer.learning_rates import LearningRates
from phalanx.precisions import LossScaler, Precision

DATA = regression_data(24)


def by_hand(steps: int, low: float, high: float) -> list[float]:
    """Return the smoothed losses of SGD over 8 samples a step with exponentially growing rates, in plain torch."""
    net, losses, mean = network(), [], 0.0
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = low * (high / low) ** (step / (steps - 1))
        begin = step % 3 * 8
        x, y = (part[begin : begin + 8] for part in DATA.tensors)
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = 0.98 * mean + 0.02 * loss.item()
        losses.append(mean / (1 - 0.98 ** (step + 1)))
    return losses


def found(ranks: int, strategy: str, **settings: Any) -> tuple[LearningRates, bool]:
    """Return the result, and whether the weights of the module are unchanged."""
    module = Regressor(optimizer="sgd")
    before = weights_of(module)
    trainer = silent_trainer(
        max_epochs=1, devices=ranks, strategy=strategy, accumulate_grad_batches=2 // ranks, **settings
    )
    rates = trainer.find_lr(module, DataLoader(DATA, batch_size=4), min_lr=1e-4, max_lr=1.0, num_training=20)
    return rates, torch.equal(before, weights_of(module))


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "zero3")])
def test_losses_are_those_of_plain_torch_on_all_ranks(ranks: int, strategy: str) -> None:
    results = run_on_ranks(ranks, found, ranks, strategy, timeout=120)

    for rates, unchanged in results:
        assert rates.results["loss"] == pytest.approx(by_hand(20, 1e-4, 1.0), rel=1e-4)
        assert rates.results["lr"][0] == 1e-4
        assert rates.results["lr"][-1] == pytest.approx(1.0)
        assert rates.suggestion() == results[0][0].suggestion() is not None
        assert unchanged


class Failing(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        raise AssertionError("callbacks take no part")


def test_callbacks_of_the_module_take_no_part() -> None:
    class WithCallbacks(Regressor):
        def configure_callbacks(self) -> list[Callback]:
            return [Failing()]

    module = WithCallbacks()
    trainer = silent_trainer(max_epochs=1, devices=1)
    assert len(trainer.find_lr(module, DataLoader(DATA, batch_size=8), num_training=3).results["lr"]) == 3
    with pytest.raises(AssertionError, match="take no part"):
        trainer.fit(module, DataLoader(DATA, batch_size=8))


class Scaled(Precision):
    """Multiplies losses by a constant scale."""

    name = "32-scaled"

    def loss_scaler(self) -> LossScaler:
        scaler = LossScaler()
        scaler.scale, scaler.growth_interval = 1024.0, 1_000_000
        return scaler


def test_the_loss_scale_is_divided_out() -> None:
    rates, _ = found(1, "single", precision=Scaled())

    assert rates.results["loss"] == pytest.approx(by_hand(20, 1e-4, 1.0), rel=1e-4)


def test_the_test_ends_where_the_loss_diverges() -> None:
    trainer = silent_trainer(max_epochs=1, devices=1)

    rates = trainer.find_lr(
        Regressor(optimizer="sgd"), DataLoader(DATA, batch_size=8), min_lr=1e-3, max_lr=1e4, num_training=60
    )

    assert 5 < len(rates.results["lr"]) < 60


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    losses = [9.0, 9.0, 8.0, 5.0, 4.0, 4.0, float("inf")]
    rates = LearningRates({"lr": [float(n) for n in range(7)], "loss": losses})

    assert rates.suggestion(skip_begin=0) == 2.0
    assert rates.suggestion(skip_begin=3) == 3.0
    assert rates.suggestion(skip_begin=6) is None


def test_linear_rates_have_a_constant_difference() -> None:
    trainer = silent_trainer(max_epochs=1, devices=1)

    rates = trainer.find_lr(
        Regressor(), DataLoader(DATA, batch_size=8), min_lr=0.1, max_lr=0.5, num_training=5, mode="linear"
    )

    assert rates.results["lr"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mode": "log"}, "mode='log'"),
        ({"num_training": 1}, "num_training=1"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "min_lr=1.0"),
        ({"max_lr": "a"}, "max_lr='a'"),
        ({"min_lr": None}, "min_lr=None"),
        ({"max_lr": float("inf")}, "max_lr=inf"),
        ({"early_stop_threshold": 0.5}, "early_stop_threshold=0.5"),
        ({"early_stop_threshold": "4"}, "early_stop_threshold='4'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], name: str) -> None:
    with refuses(PhalanxError, name):
        silent_trainer(max_epochs=1, devices=1).find_lr(Regressor(), DataLoader(DATA), **arguments)


def test_a_pipeline_is_refused_before_ranks_start() -> None:
    with refuses(ConfigurationError, "find_lr", "strategy='pipeline'"):
        silent_trainer(max_epochs=1, devices=2, strategy="pipeline").find_lr(Regressor(), DataLoader(DATA))
