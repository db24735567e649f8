"""A training that fails at chosen moments: ``restart_run.py ROOT STRATEGY RANKS MOMENTS [SNAPSHOTS]``.

A moment is ``raise-<step>`` or ``kill-<step>``, on the last rank: once, or whenever it comes there if a star follows.
With SNAPSHOTS, the steps between two of them, ranks are not restarted, and the same command continues.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.loggers import CSVLogger


class Model(TrainModule):
    """Two layers, dropout between them."""

    def __init__(self, root: Path, moments: list[str]) -> None:
        super().__init__()
        self.root, self.moments = root, moments
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def fail(self, what: str) -> None:
        for moment in self.moments:
            told = self.root / moment
            if moment.rstrip("*") == what and (moment.endswith("*") or not told.exists()):
                told.touch()
                if what.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError(what)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == self.trainer.world_size - 1:
            self.fail(f"kill-{self.global_step}")
            self.fail(f"raise-{self.global_step}")
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(
    root: Path, strategy: str, ranks: int, moments: list[str], max_restarts: int = 0, snapshots: int | None = None
) -> str:
    """Train; return how it ended."""
    root.mkdir(exist_ok=True)
    seed_everything(3)
    data = TensorDataset(torch.randn(48, 4))
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=root,
        logger=CSVLogger(root),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=ModelCheckpoint(every_n_train_steps=2 if snapshots is None else 12, save_top_k=-1),
        max_restarts=max_restarts,
        snapshots=snapshots,
    )
    model = Model(root, moments)
    trainer.fit(model, DataLoader(data, 2, shuffle=True), ckpt_path=None if snapshots is None else "auto")
    if not trainer.is_global_zero:
        return ""
    return f"ENDED {trainer.global_step} {sum(float(each.double().sum()) for each in model.parameters())}"


if __name__ == "__main__":
    every = int(sys.argv[5]) if len(sys.argv) > 5 else None
    restarts = 3 if every is None else 0
    print(train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","), restarts, every))
