"""A training on the stream of a data library: ``stream_run.py ROOT KIND RANKS WORKERS KILL``.

A checkpoint after every second step. The last rank kills itself with SIGKILL in the step after ``KILL`` steps, once.
Each rank appends to ``ROOT/seen-<rank>.txt`` a line for each step: whether a run was killed before, the step, and its
samples.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from library_streams import hugging_face, ids, litdata, loader, mosaic, split_by_node, stateful_loader, web_dataset
from torch import nn

from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint


class Seeing(TrainModule):
    """Records its samples, and is killed where it must be."""

    def __init__(self, root: Path, kill: int) -> None:
        super().__init__()
        self.root, self.kill = root, kill
        self.killed = root / "killed"
        self.is_second = self.killed.exists()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.kill and self.global_rank == self.trainer.world_size - 1 and not self.is_second:
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.root / f"seen-{self.global_rank}.txt").open("a") as file:
            file.write(json.dumps([self.is_second, self.global_step, ids(batch)]) + "\n")
        loss: torch.Tensor = self.net(torch.tensor(ids(batch)).float()[:, None]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def stream(root: Path, kind: str, workers: int, rank: int, size: int) -> Any:
    """Return the loader of a rank."""
    name, _, shuffle = kind.partition("+")
    if name in ("mosaic", "litdata"):
        return (mosaic if name == "mosaic" else litdata)(root, bool(shuffle), workers)
    if name == "torchdata":
        return stateful_loader(root, "json", workers)
    if name == "tar":
        return loader(web_dataset(root, bool(shuffle)), workers)
    if kind.startswith("split:"):
        return loader(split_by_node(root, kind.removeprefix("split:"), rank, size), workers)
    return loader(hugging_face(root, kind), workers)


def main() -> None:
    """Train one epoch, from where the newest checkpoint is."""
    root, kind, ranks, workers, kill = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=1,
        default_root_dir=root / "run",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=not kind.startswith(("split:", "mosaic", "litdata")),
        callbacks=[ModelCheckpoint(every_n_train_steps=2)],
    )
    model = Seeing(root, kill)
    model.train_dataloader = lambda: stream(  # type: ignore[method-assign]
        root / "shards", kind, workers, model.global_rank, ranks
    )
    trainer.fit(model, ckpt_path="auto")


if __name__ == "__main__":
    main()
