"""A module and its data as a program with configuration files has them. Tests copy this file into the program's folder.

It imports nothing of the tests, so that it can be imported there under any name.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, DataModule, TrainModule


class Net(TrainModule):
    """A small network that records the loss of every step."""

    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[0])
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class ScaledNet(Net):
    """A subclass with an argument of its own."""

    def __init__(self, scale: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        last = self.net[2]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(scale)


class PreemptedNet(Net):
    """A module whose process gets SIGTERM in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class BareNet(Net):
    """A module without an optimizer."""

    configure_optimizers = TrainModule.configure_optimizers


class Points(DataModule):
    """24 points in three dimensions; the target is their sum."""

    def __init__(self, batch_size: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed

    def setup(self, stage: str) -> None:
        x = torch.randn(24, 3, generator=torch.Generator().manual_seed(self.seed))
        self.samples = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Reminder(Callback):
    """Prints a text when a fit begins."""

    def __init__(self, text: str = "begins") -> None:
        self.text = text

    def on_fit_start(self, trainer: Any, module: TrainModule) -> None:
        print(f"rank {trainer.global_rank}: {self.text}", flush=True)
