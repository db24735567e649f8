"""The run that ``test_remote_loggers.py`` kills. Arguments: ROOT TRACKING_URI KILL_AT WHERE.

Every step is recorded by every logger, with a checkpoint after every second one and an epoch of six. ``KILL_AT`` is the
number of finished steps after which the process kills itself, 0 for never; ``WHERE`` is ``between`` steps or ``within``
the next one, after its loss was logged.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import wait_until
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trackio import SQLiteStorage

from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.loggers import JSONLinesLogger, MLFlowLogger, TrackioLogger, WandbLogger


class Net(TrainModule):
    """A model that logs in each step and each epoch, and an image in each validation."""

    def __init__(self, lr: float = 0.1, api_key: str = "0123456789abcdef0123") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).mean())
        for logger in self.trainer.loggers:
            logger.log_image("rows", batch[0][None].detach(), caption="a row")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def newest_step(logger: MLFlowLogger | TrackioLogger) -> int:
    """Return the newest step in a store, which is read with its own library."""
    if isinstance(logger, MLFlowLogger):
        history = logger.experiment.get_metric_history(logger.run_id, "loss")
        return max((point.step for point in history), default=-1)
    run = logger.experiment
    return SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=run.id) or -1


class Kill(Callback):
    """Kills the process, once what was logged so far has left it, or at once."""

    def __init__(self, finished: int, where: str) -> None:
        self.finished = finished
        self.where = where

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "between" and trainer.global_step == self.finished:
            # The points after the newest checkpoint reach the stores, and the resumed run must not repeat them.
            wait_until(lambda: all(newest_step(logger) == self.finished - 1 for logger in trainer.loggers[1:3]))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.where == "within" and trainer.global_step == self.finished:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, from where the newest checkpoint is."""
    root, uri, kill_at, where = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=1)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=root,
        logger=[
            JSONLinesLogger(),
            MLFlowLogger("digits", tracking_uri=uri),
            TrackioLogger("digits"),
            WandbLogger(offline=True, project="digits"),
        ],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), *([Kill(kill_at, where)] if kill_at else [])],
    )
    trainer.fit(Net(), data, DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2), ckpt_path="auto")
