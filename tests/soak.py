"""Kill a rank of a training run at intervals, and measure the share of the time in which the run trains.

    python tests/soak.py --minutes 10 --every 30 --strategy ddp
    python tests/soak.py --minutes 30 --every 60 --save-every 2000 --beside-disk

With ``--beside-disk`` a second run follows, which takes no snapshots in memory and restarts from the disk.

The share is the time in which steps were trained that count, divided by the time from the command's start to its end.
A second share takes the median step for all of them, so that copies and saves are lost time as well. A restart costs
the detection of the dead rank, the wait before the next attempt, the start of Python and torch on each rank, and the
steps since the last checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from launches import Launch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.checkpoint import verify

WIDTH = 256
STEPS = "steps.txt"
PREEMPTED = 75
LEAST_SHARE = 0.85


class Model(TrainModule):
    """Some layers; rank 0 records each step and its time."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            with (self.root / STEPS).open("a") as file:
                file.write(f"{self.global_step} {time.monotonic()}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(root: Path, strategy: str, ranks: int, every: int, snapshots: str) -> None:
    """Train until the process is ended."""
    seed_everything(1)
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_epochs=-1,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=ModelCheckpoint(every_n_train_steps=every, asynchronous=True),
        max_restarts=10_000,
        snapshots="auto" if snapshots == "memory" else False,
    )
    trainer.fit(Model(root), DataLoader(TensorDataset(torch.randn(4096, WIDTH)), 64, shuffle=True), ckpt_path="auto")


def soak(root: Path, options: argparse.Namespace, source: str) -> float:
    """Run and kill; print the results and return the share of the time that was trained.

    Args:
        root: the directory of the run.
        options: those of the command line.
        source: where restarts continue from, ``"memory"`` or ``"disk"``.
    """
    draw, strategy, ranks, every = random.Random(options.seed), options.strategy, options.ranks, options.every
    launch = Launch(root, Path(__file__), ["train", strategy, str(ranks), str(options.save_every), source])
    kills, until = 0, launch.began + 60.0 * options.minutes
    try:
        while (left := until - time.monotonic()) > 0 and launch.wait(min(every, left)):
            if time.monotonic() < until:
                launch.send(signal.SIGKILL, [draw.choice(launch.ranks())])
                kills += 1
        seconds = time.monotonic() - launch.began
        launch.send(signal.SIGTERM, [launch.process.pid])
        launch.end(60.0)
    finally:
        launch.abandon()
    lines = [line.split() for line in (root / STEPS).read_text().splitlines()]
    steps = [(int(step), float(when)) for step, when in lines]
    times = [b - a for (one, a), (other, b) in itertools.pairwise(steps) if other == one + 1]
    each, again = statistics.median(times), len(steps) - steps[-1][0]
    # Between the first step and the last, without restarts and what was computed again. The second share counts as lost
    # what a step takes longer than most do: copies, saves, and other work of the machine.
    share, by_median = (sum(times) - again * each) / seconds, steps[-1][0] * each / seconds
    damaged = [path.name for path in root.rglob("*.ckpt") if verify(path)]
    print(
        f"{strategy}, {ranks} ranks, from {source}: {kills} kills in {seconds:.0f} s; {steps[-1][0]} steps of "
        f"{each * 1e3:.1f} ms, "
        f"{again} computed again; exit code {launch.process.returncode}; damaged checkpoints: {damaged or 'none'}; "
        f"{share:.1%} of the time was trained, {by_median:.1%} by the median of a step"
    )
    if launch.process.returncode != PREEMPTED or damaged:
        raise SystemExit(launch.printed())
    return share


def main() -> None:
    """Run from the command line, or be the training run."""
    if sys.argv[2:3] == ["train"]:
        train(Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=50, help="optimizer steps between two checkpoints")
    parser.add_argument("--beside-disk", action="store_true", help="also run without snapshots in memory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shares = []
    for source in ("memory", "disk") if options.beside_disk else ("memory",):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            shares.append(soak(Path(folder), options, source))
    sys.exit(shares[0] < LEAST_SHARE)


if __name__ == "__main__":
    main()
