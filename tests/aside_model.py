"""A model whose evaluations are known beforehand, for a process that imports it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import SILENT
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule
from phalanx.callbacks import Evaluate, ModelCheckpoint


class Line(TrainModule):
    """A weight that grows by one in each step."""

    def __init__(self, begin: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = nn.Parameter(torch.full((2,), begin))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def distance(trainer: Any, module: Any) -> dict[str, Any]:
    """Return how far the weights are from three."""
    assert trainer.world_size == 1
    assert not module.training
    return {"distance": (module.weight - 3).abs().mean()}


def broken(trainer: Any, module: Any) -> dict[str, Any]:
    """Fail."""
    raise RuntimeError("no such data")


def fit(root: Path, strategy: str, steps: int, function: Any = distance, **arguments: Any) -> ModelCheckpoint:
    """Train with a save every 2 steps, ranked by an evaluation aside."""
    further, resumed = arguments.pop("callbacks", []), arguments.pop("ckpt_path", None)
    saver = ModelCheckpoint(monitor="eval/distance", mode="min", every_n_train_steps=2, save_last=True)
    settings = {
        **SILENT,
        "devices": "auto",
        "enable_checkpointing": True,
        "logger": ["csv", "tensorboard"],
        **arguments,
    }
    callbacks = [*further, Evaluate(function, aside=True), saver]
    trainer = Trainer(**settings, strategy=strategy, max_steps=steps, callbacks=callbacks, default_root_dir=str(root))
    trainer.fit(Line(0.0), DataLoader(torch.arange(64)), ckpt_path=resumed)  # type: ignore[arg-type]
    return saver
