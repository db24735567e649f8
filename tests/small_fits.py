"""A small model, its data, and a Trainer that shows nothing: what the tests of callbacks train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.framework.api.train_module import TrainModule
from phalanx.framework.trainer.trainer import Trainer


class Tiny(TrainModule):
    """Learns nothing of note. ``figures`` maps a metric to its value by epoch, logged in validation."""

    def __init__(self, figures: dict[str, list[float]] | None = None, lr: float = 0.01) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.figures = figures or {}
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, values in self.figures.items():
            self.log(name, values[min(self.current_epoch, len(values) - 1)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(samples: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    """Return a loader of random rows [batch_size, 4]."""
    rows = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), batch_size=batch_size)


def quiet_trainer(root: Path, callbacks: Any, **settings: Any) -> Trainer:
    """Return a Trainer on one CPU rank that logs nothing, saves nothing by itself and shows nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": None,
        "default_root_dir": root,
        "num_sanity_val_steps": 0,
    }
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    if not any(callback.runs_last for callback in given):
        defaults["enable_checkpointing"] = False
    return Trainer(callbacks=given, **{**defaults, **settings})


def capturing(trainer: Trainer) -> list[str]:
    """Collect what the trainer tells the person from now on."""
    notes: list[str] = []
    trainer.note = notes.append  # type: ignore[method-assign, assignment]
    return notes
