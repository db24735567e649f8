"""A fit whose ranks phalanx starts: ``snapshot_run.py WIDTH LAYERS SNAPSHOTS STEPS``; prints milliseconds per step."""

from __future__ import annotations

import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback, Trainer, TrainModule

ROWS = 64
# The interval of snapshots="auto" is found in the first part.
SETTLING = 0.4


class Net(TrainModule):
    """Linear layers of one width, with AdamW: a snapshot has three numbers for each parameter."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Takes the time after each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    """Train, and print the mean time of a step after the first ones."""
    width, layers, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    setting = sys.argv[3]
    given: int | str | bool = int(setting) if setting.isdigit() else setting == "auto" and setting
    torch.set_num_threads(1)
    clock = Clock()
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", max_steps=steps, snapshots=given, max_restarts=1, callbacks=clock, barebones=False,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            enable_report=False, verbose=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Net(width, layers), DataLoader(torch.randn(ROWS * steps, width), ROWS))  # type: ignore[arg-type]
    first = int(SETTLING * steps)
    print("ms", (clock.times[-1] - clock.times[first]) / (len(clock.times) - 1 - first) * 1e3)


if __name__ == "__main__":
    main()
