"""The run whose ranks ``recovery_trials.py`` kills: ``recovery_run.py ROOT STRATEGY RANKS SNAPSHOTS``.

STRATEGY may have degrees, as in ``"fsdp tp=2"``. The ranks are restarted from snapshots in memory. Rank 0 writes the
step and the time at the start of each batch to ``ROOT/steps``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from kill_run import Net, write_result
from torch.utils.data import DataLoader, TensorDataset

from phalanx import AccumulationSchedule, Callback, Trainer, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.loggers import CSVLogger

STEPS = "steps"
EPOCHS = 2


class Recorder(Callback):
    """Records when each batch begins, and makes a step take as long as it does with a model of some size."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step} {time.monotonic()}\n")
        time.sleep(0.01)


def main() -> None:
    """Train for some epochs, with a checkpoint at the end of each."""
    root, ranks, every = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
    strategy, _, degrees = sys.argv[2].partition(" ")
    seed_everything(5)
    x = torch.randn(240, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        parallel=degrees or None,
        max_epochs=EPOCHS,
        default_root_dir=root,
        logger=CSVLogger(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_report=False,
        verbose=False,
        val_check_interval=19,
        accumulate_grad_batches=AccumulationSchedule.cycle([1, 2]),
        callbacks=[ModelCheckpoint(monitor="val", save_top_k=2, save_last=True), Recorder(root / STEPS)],
        max_restarts=100,
        snapshots=every if every == "auto" else int(every),
    )
    trainer.fit(module, DataLoader(data, max(2, 4 // ranks), shuffle=True), DataLoader(data, 60), ckpt_path="auto")
    write_result(root, trainer, module)


if __name__ == "__main__":
    main()
