"""phalanx's Trainer under any strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx import Trainer, TrainModule
from phalanx.strategies import DeepSpeedStrategy

from .job import Job
from .model import build, optimizer_of


class Task(TrainModule):
    """The model, whose step is the one of the other sides."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = build(job.size, job.device)
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


def strategy_of(job: Job) -> Any:
    """Return the strategy of a job, with its settings if there are any."""
    if job.options:
        return DeepSpeedStrategy(stage=int(job.strategy[-1]), config=dict(job.options))
    return job.strategy


def fit(job: Job) -> None:
    """Fit the task with ``precision="bf16-mixed"``."""
    trainer = Trainer(
        accelerator=job.device.type,
        devices=1,
        strategy=strategy_of(job),
        precision="bf16-mixed",
        compile="blocks" if job.compiled else False,
        max_epochs=1,
        barebones=True,
        default_root_dir=job.folder,
        # The side waits while other sides are measured.
        stall_timeout=False,
    )
    trainer.fit(Task(job), job.batches)
