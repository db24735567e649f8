"""A fit that records the samples of each step, for the commands about its data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from models import SILENT
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint

POISONED = 11


class Window(NamedTuple):
    """The samples of a rank in a window; one whose update was skipped has the step of the next one."""

    epoch: int
    attempt: int
    step: int
    samples: list[int]


class Recorder(TrainModule):
    """Records the samples of each micro-batch. The loss of one sample may be not finite."""

    def __init__(self, count: int, poisoned: int = -1) -> None:
        super().__init__()
        self.net, self.count, self.poisoned = nn.Linear(1, 1), count, poisoned
        self.windows: list[Window] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        trainer = self.trainer
        samples = x[:, 0].long().tolist()
        self.windows.append(Window(trainer.current_epoch, trainer.progress.steps_reached, trainer.global_step, samples))
        loss: Tensor = (self.net(x / self.count) - 1).square().mean()
        return loss * math.nan if self.poisoned in x else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def recorded(
    root: str, ckpt_path: str | None, count: int, every: int, arguments: dict[str, Any], **options: Any
) -> tuple[Recorder, Trainer]:
    """Fit on samples by their numbers, in batches of two, and save after each ``every``-th step.

    Args:
        arguments: those of the Trainer.
        options: those of the loader.
    """
    torch.manual_seed(3)
    module = Recorder(count, POISONED if arguments.get("nonfinite") == "skip" else -1)
    saves = ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)
    given = {**SILENT, "logger": "csv", "enable_checkpointing": True, "callbacks": [saves], **arguments}
    trainer = Trainer(**given, default_root_dir=root)
    data = TensorDataset(torch.arange(count).float()[:, None])
    trainer.fit(module, DataLoader(data, 2, **options), ckpt_path=ckpt_path)
    return module, trainer
