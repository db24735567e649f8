"""Under ZeRO, what hooks and steps do to weights and gradients means what it means in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import says
from mixture import PLACES
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies import DeepSpeedStrategy

ROWS = 12
Action = Callable[[Any], None]
Actions = dict[str, list[Action]]


class Acting(TrainModule):
    """Two layers, of which the first has an odd size; calls the actions of each of its hooks."""

    def __init__(self, actions: Actions) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)
        self.actions = actions

    def act(self, moment: str) -> None:
        for action in self.actions.get(moment, ()):
            action(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.act("step")
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x).mean(1)
        loss: Tensor = (self.second(torch.tanh(self.first(x))).squeeze(1) - y - target).square().mean()
        return loss

    def on_fit_start(self) -> None:
        self.act("on_fit_start")

    def on_after_backward(self) -> None:
        self.act("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.act("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def data(ranks: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, generator=generator))
    return DataLoader(rows, batch_size=6 // ranks)


def trained(strategy: Any, ranks: int, actions: Actions, **options: Any) -> dict[str, Tensor]:
    """Return the weights after two epochs of two batches."""
    module = Acting(actions)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_epochs=2, **options)
    trainer.fit(module, data(ranks))
    return {name: one.detach().clone() for name, one in module.named_parameters() if not one.is_meta}


# ---- writing weights ------------------------------------------------------------------------------------------------


@torch.no_grad()
def clamp(module: Any) -> None:
    for parameter in module.first.parameters():
        parameter.clamp_(-0.2, 0.2)


def clamp_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def momentum(module: Any) -> None:
    for mine, new in zip(module.teacher.parameters(), module.first.parameters(), strict=True):
        mine.mul_(0.5).add_(new, alpha=0.5)


def load(module: Any) -> None:
    state = {name: torch.full(one.shape, 0.1) for name, one in module.second.named_parameters()}
    module.second.load_state_dict(state)


# Most are in the table of semantics. Here ZeRO keeps its state in every place, and updates have several micro-batches.
WRITES: list[Actions] = [{"on_fit_start": [load], "step": [momentum], "on_train_batch_end": [clamp]}]


# ---- gradients ------------------------------------------------------------------------------------------------------


def freeze_layer(module: Any) -> None:
    for parameter in module.first.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.0)


def noise(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.grad + 0.01 * torch.arange(float(parameter.numel())).view(parameter.shape)


def clip_norm(module: Any) -> None:
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    assert float(norm) > 0.05


def clip_value(module: Any) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)
    assert all(float(one.grad.abs().max()) <= 0.01 for one in module.parameters() if one.requires_grad)


def drop(module: Any) -> None:
    module.second.bias.grad = None


# With the number of micro-batches of an update.
CHANGES: list[tuple[Actions, int]] = [
    ({"on_after_backward": [noise], "on_before_optimizer_step": [drop]}, 1),
    ({"on_before_optimizer_step": [clip_norm, clip_value]}, 2),
    ({"on_after_backward": [clip_value], "on_before_optimizer_step": [freeze_layer]}, 2),
]


def changed(strategy: Any, ranks: int) -> list[dict[str, Tensor]]:
    return [
        *(trained(strategy, ranks, actions) for actions in WRITES),
        *(trained(strategy, ranks, actions, accumulate_grad_batches=count) for actions, count in CHANGES),
    ]


ROUND_ROBIN: dict[str, dict[str, Any]] = {
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "round robin, offload": {"stage": 1, "round_robin_gradients": True, "offload_optimizer": "cpu"},
}


def changed_under(place: str, ranks: int) -> list[dict[str, Tensor]]:
    return changed(DeepSpeedStrategy(**{**PLACES, **ROUND_ROBIN}[place]), ranks)


@pytest.mark.parametrize(
    ("place", "ranks"), [*((place, 2) for place in (*PLACES, *ROUND_ROBIN)), ("zero3", 1), ("zero3", 3)]
)
def test_weights_and_gradients_that_user_code_changes(place: str, ranks: int) -> None:
    found = run_on_ranks(ranks, changed_under, place, ranks)[0]
    for actions, one, other in zip([*WRITES, *CHANGES], found, changed("single", 1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"{actions}: other weights")


def in_bf16(strategy: str, ranks: int) -> list[dict[str, Tensor]]:
    cases: list[Actions] = [
        {"on_after_backward": [noise], "on_before_optimizer_step": [clip_norm, drop]},
        {"step": [momentum], "on_train_batch_end": [clamp_data]},
    ]
    return [trained(strategy, ranks, actions, precision="bf16-mixed") for actions in cases]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_changes_apply_to_the_masters_of_a_lower_dtype(strategy: str) -> None:
    expected = in_bf16("single", 1)
    torch.testing.assert_close(run_on_ranks(2, in_bf16, strategy, 2)[0], expected, rtol=0.02, atol=0.02)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def attempt(fabric: Any, what: str) -> None:
    net: Any = Twice()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if what == "data":
        net.layer.weight.data = torch.zeros(2, 2)
    fabric.backward(model(torch.ones(2, 3, requires_grad=True)).sum())


def refused(strategy: str, what: str) -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(ConfigurationError) as caught:
        attempt(fabric, what)
    fabric.free_memory()
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "what", "name"),
    [("zero2", "twice", "layer.bias"), ("zero3", "twice", "layer.bias"), ("zero3", "data", "(2, 2)")],
)
def test_what_the_engine_cannot_do_is_refused(strategy: str, what: str, name: str) -> None:
    says(run_on_ranks(2, refused, strategy, what), name)
