"""A training run that writes its losses down: ``host_run.py FOLDER STRATEGY DEVICES NODES STEPS [SECONDS [SAMPLES]]``.

With 0 for ``DEVICES`` it runs on whatever the launcher has started. With ``SECONDS`` each step takes so long, and a
rank that is silent for 6 s ends the run. ``SAMPLES``: those of a global batch; then the limit is 15 s, longer than a
launcher waits for a sign of life of another node. A file ``enough`` in the folder ends the
run after the step under way. The weights at the end are in ``weights.pt``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.callbacks import ModelCheckpoint

ENOUGH = "enough"
URL = "HOST_RUN_URL"
"""The variable with the URL of the run, if it is in a bucket."""


class Noting(TrainModule):
    """A small network that appends to a file of its rank: each step, its loss, the number of ranks, the samples."""

    def __init__(self, folder: Path, seconds: float, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.Linear(16, 1))
        self.folder = folder
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        note = [self.global_step, loss.item(), self.trainer.world_size, batch[0][:, 0].tolist()]
        with (self.folder / f"losses_{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        if (self.folder / ENOUGH).exists():
            self.trainer.should_stop = True
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main(
    folder: Path, strategy: str, devices: int, nodes: int, steps: int, seconds: float = 0.0, samples: float = 0.0
) -> None:
    """Train, resuming where a run in the same folder left off."""
    seed_everything(3)
    data = TensorDataset(torch.randn(96, 4))
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices or "auto",
        num_nodes=nodes,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ.get(URL, folder),
        callbacks=[ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)],
        stall_timeout=(15.0 if samples else 6.0) if seconds else None,
        global_batch_size=int(samples) or None,
    )
    # Another number of ranks draws other random numbers.
    module = Noting(folder, seconds, 0.0 if samples else 0.2)
    trainer.fit(module, DataLoader(data, 2, shuffle=True), ckpt_path="auto")
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "weights.pt")
        print("ENDED", trainer.global_step, flush=True)


if __name__ == "__main__":
    path, name, *numbers = sys.argv[1:]
    main(Path(path), name, *map(int, numbers[:3]), *map(float, numbers[3:]))
