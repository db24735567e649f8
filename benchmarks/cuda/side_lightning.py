"""Lightning's Trainer, with the settings of phalanx's."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .job import Job
from .model import build, compile_blocks, optimizer_of

L: Any = import_module("lightning.pytorch")

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(L.LightningModule):  # type: ignore[misc]
    """The model, whose step is the one of the other sides."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = build(job.size, job.device)
        if job.compiled:
            compile_blocks(self.model)
        self.clock, self.size = job.clock, job.size

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        self.clock.step()
        loss: Tensor = self.model(batch)
        self.clock.keep(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the fused AdamW."""
        return optimizer_of(self, self.size)


def fit(job: Job) -> None:
    """Fit the task with ``precision="bf16-mixed"``."""
    trainer = L.Trainer(
        accelerator=job.device.type,
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        barebones=True,
        default_root_dir=str(job.folder),
    )
    trainer.fit(Task(job), job.batches)
