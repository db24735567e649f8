"""Sweeps that are killed: ``sweep_trials.py [--trials 20] [--kills 3] [--ranks 2] [--seed 0]``.

Runs one sweep undisturbed. Then it runs the same sweep, kills all its processes at random moments, and starts the
command again. Prints both, and fails unless each trial is there once, with the same parameters, the same values and the
same best trial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = """
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, Trainer, TrainModule, seed_everything


class Model(TrainModule):
    def __init__(self, lr, width):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Pause(Callback):
    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        time.sleep(self.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    given = parser.parse_args()
    if given.width == 13:
        raise ValueError("an unlucky width")
    seed_everything(3)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(
        accelerator="cpu", max_epochs=given.epochs, logger="csv", verbose=False, callbacks=[Pause(given.pause)]
    )
    model = Model(given.lr, given.width)
    trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 32))
"""
"""A script whose fit takes ``lr`` and ``width``; a width of 13 fails."""


def sweep_arguments(trials: int, ranks: int, *more: str) -> list[str]:
    """Return the arguments of ``phalanx sweep``."""
    search = ["--search", "lr=log:1e-5:1e-1 width=4,8,16"]
    options = ["--metric", "val_loss", "--trials", str(trials), "--ranks", str(ranks), "--prune", "median"]
    return ["train.py", *search, *options, "--out", "sweep", "--json", *more]


def sweep(folder: Path, given: list[str], kills: list[float], timeout: float) -> dict[str, Any]:
    """Run a sweep in a folder, kill it after each of some times in seconds, and return what it prints at its end."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    for seconds in [*kills, timeout]:
        with (folder / "errors").open("a") as errors:
            process = subprocess.Popen(
                given, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        try:
            shown, _ = process.communicate(timeout=seconds)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            started = len([*folder.glob("sweep/trial-*")])
            print(f"  killed after {seconds:.1f} s, in trial {started - 1}", flush=True)
    assert process.returncode == 0, (folder / "errors").read_text()
    found: dict[str, Any] = json.loads(shown)
    return found


def compared(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what must be the same in both sweeps of each trial."""
    return [(each["number"], each["state"], each["value"], each["parameters"]) for each in found["trials"]]


def main() -> None:
    """Compare a sweep with one that is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    arguments = sweep_arguments(options.trials, options.ranks, "--", "--pause", "0.02")
    given = [sys.executable, "-m", "phalanx", "sweep", *arguments]
    with tempfile.TemporaryDirectory() as root:
        began = time.monotonic()
        whole = sweep(Path(root, "whole"), given, [], 3600.0)
        seconds = time.monotonic() - began
        print(f"undisturbed: {seconds:.0f} s")
        draw = random.Random(options.seed)
        kills = [draw.uniform(0.1, 0.9) * seconds / options.kills for _ in range(options.kills)]
        killed = sweep(Path(root, "killed"), given, kills, 3600.0)
        runs = [
            len([*Path(root, "killed", "sweep").glob(f"trial-{number}/version_*")]) for number in range(options.trials)
        ]
    states = [each["state"] for each in killed["trials"]]
    print(f"trials: {len(states)}, {', '.join(f'{states.count(state)} {state}' for state in sorted(set(states)))}")
    print(f"best: {whole['best']['value']} undisturbed, {killed['best']['value']} killed {options.kills} times")
    assert compared(whole) == compared(killed)
    assert max(runs) == 1
    print("each trial is there once, with the same parameters and the same value")


if __name__ == "__main__":
    main()
