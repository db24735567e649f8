"""Code of users under ``ddp`` that freezes, unfreezes and adds parameters, or averages gradients by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import says
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies.ddp import DDPStrategy

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


class Freezing(TrainModule):
    """Trains other layers in each batch, and freezes the first one within a window of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - 1).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.global_step in (1, 3))
        self.net[2].requires_grad_(self.global_step != 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def fitted(ranks: int, window: int) -> list[Tensor]:
    module = Freezing()
    options: dict[str, Any] = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer = silent_trainer(max_epochs=1, accumulate_grad_batches=window, **options)
    trainer.fit(module, DataLoader(TensorDataset(X), 12 // ranks // window))
    return [each.detach() for each in module.parameters()]


def trained_in_fabric(ranks: int) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "single")
    model = network()
    model[2].requires_grad_(False)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5))
    for number, part in enumerate(X.view(4, 12, 4)):
        optimizer.zero_grad()
        fabric.backward((model(part.view(ranks, -1, 4)[fabric.global_rank]) - 1).square().mean())
        optimizer.step()
        model[2].requires_grad_(number < 2)
        model[0].requires_grad_(number > 0)
    return [each.detach() for each in model.parameters()]


def add_layer_too_late() -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.2))
    late = nn.Linear(1, 1)
    optimizer.add_param_group({"params": late.parameters()})
    fabric.backward(late(model(X)).square().mean())
    with pytest.raises(ConfigurationError) as caught:
        optimizer.step()
    return str(caught.value)


def everything(ranks: int) -> tuple[Any, ...]:
    return fitted(ranks, 1), fitted(ranks, 2), trained_in_fabric(ranks)


def test_layers_that_are_frozen_and_unfrozen_within_an_epoch() -> None:
    expected = everything(1)
    for found in run_on_ranks(3, everything, 3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_parameters_that_no_rank_averages_are_refused() -> None:
    says(run_on_ranks(2, add_layer_too_late), "on_train_epoch_start")


# ---- manual optimization, also where weights are not on the CPU ------------------------------------------------------


def reduced(device_type: str) -> list[list[float] | None]:
    """Average gradients that some ranks lack; the tensors stay on the CPU, also where the ranks are on CUDA."""
    strategy = DDPStrategy()
    world = strategy.connect("cpu", 1, resolve_precision("32-true"))
    world.device = torch.device(device_type)
    both, first, none = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    both.grad = torch.tensor([1.0, 2.0]) * (world.rank + 1)
    if world.rank == 0:
        first.grad = torch.tensor([4.0, 8.0])
    strategy.reduce_gradients([both, none, first])
    world.close()
    return [None if each.grad is None else each.grad.tolist() for each in (both, first, none)]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_gradients_that_some_ranks_lack_are_averaged(device_type: str) -> None:
    expected = [[1.5, 3.0], [2.0, 4.0], None]
    assert run_on_ranks(2, reduced, device_type) == [expected, expected]
