"""Learning-rate schedules by name: the factors of transformers, in a fit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from messages import refuses
from models import Regressor, loader, silent_trainer

from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.framework.core.schedules import named_schedule

STEPS = 57


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)


def rates(scheduler: Any, steps: int = STEPS) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


OF_TRANSFORMERS = {
    "constant": transformers.get_constant_schedule_with_warmup,
    "linear": transformers.get_linear_schedule_with_warmup,
    "cosine": transformers.get_cosine_schedule_with_warmup,
    "inverse_sqrt": transformers.get_inverse_sqrt_schedule,
    "wsd": transformers.get_wsd_schedule,
}


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    arguments: dict[str, Any] = {"num_warmup_steps": warmup}
    if name in ("linear", "cosine", "wsd"):
        arguments["num_training_steps"] = STEPS
    if name == "wsd":
        arguments["num_decay_steps"] = 12
    expected = rates(OF_TRANSFORMERS[name](optimizer(), **arguments))
    assert rates(named_schedule(name, optimizer(), STEPS, warmup, 12)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_shares_are_those_of_all_steps() -> None:
    assert rates(named_schedule("wsd", optimizer(), 50, 0.1, 0.2), 50) == rates(
        named_schedule("wsd", optimizer(), 50, 5, 10), 50
    )


class Scheduled(Regressor):
    """Trains with what ``returned`` makes of its optimizer, and notes the learning rate of each update."""

    def __init__(self, **returned: Any) -> None:
        super().__init__()
        self.returned = returned
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.3), **self.returned}


@pytest.mark.parametrize(
    "returned",
    [
        {"lr_scheduler": "cosine", "warmup": 0.25},
        {"lr_scheduler": {"scheduler": "cosine", "warmup": 3}},
    ],
)
def test_a_fit_steps_it_after_each_update(returned: dict[str, Any]) -> None:
    module = Scheduled(**returned)
    silent_trainer(max_epochs=3, accumulate_grad_batches=2).fit(module, loader(28))
    expected = transformers.get_cosine_schedule_with_warmup(optimizer(), 3, 12)
    assert module.rates == pytest.approx(rates(expected, 12))


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        ({"lr_scheduler": "cosin"}, UnknownNameError, "Did you mean 'cosine'?"),
        ({"lr_scheduler": "linear", "warmup": -1}, ConfigurationError, "warmup=-1 must be a number of steps"),
        ({"lr_scheduler": {"scheduler": "linear", "interval": "epoch"}}, ConfigurationError, "steps after each"),
        ({"lr_scheduler": {"scheduler": "linear", "warm_up": 3}}, ConfigurationError, "Did you mean 'warmup'?"),
    ],
)
def test_what_is_wrong_is_refused(returned: dict[str, Any], kind: type[Exception], message: str) -> None:
    with refuses(kind, message):
        silent_trainer(max_epochs=1).fit(Scheduled(**returned), loader(4))


def test_a_fit_without_an_end_is_refused() -> None:
    with refuses(ConfigurationError, "needs the number of optimizer steps"):
        silent_trainer(max_epochs=-1).fit(Scheduled(lr_scheduler="cosine"), loader(4))
