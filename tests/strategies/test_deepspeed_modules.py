"""Under ZeRO stage 3, modules, metrics and states that other code asks for hold what they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError


def saved_by_original(strategy: str, path: str) -> tuple[dict[str, tuple[int, ...]], list[bool]]:
    """Save and load the objects that were given to ``setup``; return shapes, and whether training continues equally."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    plain = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, plain)
    x = torch.ones(2, 6)

    def step() -> float:
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step()
    fabric.save_state(path)
    fabric.save(path + ".originals", {"net": net, "optimizer": plain})
    continued, same = [step(), step()], []
    fabric.load_state(path)
    same.append([step(), step()] == continued)
    fabric.load(path + ".originals", {"net": net, "optimizer": plain})
    same.append([step(), step()] == continued)
    shapes = {name: tuple(tensor.shape) for name, tensor in fabric.load_raw(path).items()}
    fabric.free_memory()
    return shapes, same


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_a_checkpoint_of_the_original_objects_holds_full_weights(strategy: str, tmp_path: Any) -> None:
    for shapes, same in run_on_ranks(2, saved_by_original, strategy, str(tmp_path / "all")):
        assert shapes == {"weight": (4, 6), "bias": (4,)}
        assert same == [True, True]


def states(stage: int) -> tuple[dict[str, tuple[int, ...]], str]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=f"zero{stage}")
    net = nn.Sequential(nn.Linear(6, 4))
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    shapes, message = {}, ""
    try:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    except ConfigurationError as error:
        message = str(error)
    fabric.free_memory()
    return shapes, message


def test_a_state_dict_is_full_or_refused() -> None:
    for shapes, message in run_on_ranks(2, states, 2):
        assert (shapes, message) == ({"0.weight": (4, 6), "0.bias": (4,)}, "")
    for shapes, message in run_on_ranks(2, states, 3):
        assert not shapes
        assert "'0.weight' without elements" in message
        assert "fabric.save_model(model, directory)" in message


class Measured(TrainModule):
    """Updates a metric in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = nn.Linear(4, 1), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.net(batch[0]).flatten() * 0 + 2)
        self.log("mean", self.mean)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measured(strategy: str) -> list[float]:
    loader = DataLoader(TensorDataset(torch.ones(21, 4)), batch_size=2)
    trainer = silent_trainer(strategy=strategy, devices=2, max_epochs=2)
    module = Measured()
    trainer.fit(module, loader, loader)
    found = [float(trainer.callback_metrics["mean"])]
    trainer.validate(module, loader)
    return [*found, float(trainer.callback_metrics["mean"])]


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_metric_is_updated_in_validation(strategy: str) -> None:
    assert run_on_ranks(2, measured, strategy) == [[2.0, 2.0]] * 2
