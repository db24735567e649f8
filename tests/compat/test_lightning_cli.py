"""A project that was written for LightningCLI: three files and a configuration, with its import lines changed."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_command, run_script
from torch import nn

MODEL = """
import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics.functional import accuracy


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16, classes: int = 2, dropout: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, classes))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", accuracy(logits, y, task="multiclass", num_classes=self.hparams.classes))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y))
"""
DATA = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Points(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8, classes: int = 2, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
        y = (x.abs().sum(1) * 10).long() % self.hparams.classes
        self.train, self.val = TensorDataset(x[:44], y[:44]), TensorDataset(x[44:], y[44:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return self.val_dataloader()
"""
MAIN = """
from data import Points
from lightning.pytorch.cli import LightningCLI
from model import Classifier


class ProjectCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--project", default="points")
        parser.link_arguments("data.classes", "model.classes")

    def before_fit(self):
        print("project", self.config.fit.project)


def main():
    ProjectCLI(Classifier, Points, seed_everything_default=42, trainer_defaults={"enable_model_summary": False})


if __name__ == "__main__":
    main()
"""
CONFIG = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 3
  log_every_n_steps: 1
  gradient_clip_val: 0.5
  enable_progress_bar: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args:
      save_dir: logs
      name: points
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        monitor: val_loss
        filename: best
        save_last: true
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
      init_args:
        logging_interval: epoch
    - class_path: EarlyStopping
      init_args:
        monitor: val_loss
        patience: 10
model:
  width: 12
data:
  batch_size: 8
  classes: 3
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.02
    weight_decay: 0.1
lr_scheduler:
  class_path: torch.optim.lr_scheduler.StepLR
  init_args:
    step_size: 1
    gamma: 0.5
"""
FILES = {"model.py": MODEL, "data.py": DATA, "main.py": MAIN, "config.yaml": CONFIG}


def write_project(folder: Path) -> Path:
    """Write the project as it is for Lightning."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text.removeprefix("\n"))
    return folder


def migrate(project: Path) -> None:
    """Let the command change the project."""
    done = run_command([sys.executable, "-m", "phalanx", "migrate", ".", "--write"], project)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("; 0 lines left to you\n"), done.stdout


def run(project: Path, *arguments: str) -> str:
    """Run the migrated program to its end; return what it printed."""
    libraries = ("jsonargparse", "torchmetrics")
    done = run_script(project / "main.py", *arguments, cwd=project, timeout=120.0, libraries=libraries)
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


def run_with_lightning(project: Path, *arguments: str) -> None:
    """Run the program as it was, to its end."""
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    done = run_command([sys.executable, "main.py", *arguments], project, environment, timeout=120.0)
    assert done.returncode == 0, done.stdout


def column(project: Path, name: str) -> list[float]:
    """Return the values of a metric in the newest run's file."""
    path = max(project.glob("logs/*/version_*/metrics.csv"))
    with path.open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row[name]]


def torch_losses() -> list[float]:
    """Return the losses of the same model and data in a loop of plain torch."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.0), nn.Linear(12, 3))
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    y = (x.abs().sum(1) * 10).long() % 3
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for _ in range(3):
        for inputs, targets in zip(x[:44].split(8), y[:44].split(8), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
    return losses


@pytest.mark.timeout(300)
def test_a_migrated_project_trains_as_with_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    project, theirs = write_project(tmp_path / "ours"), write_project(tmp_path / "theirs")
    run_with_lightning(theirs, "fit", "--config", "config.yaml")
    migrate(project)
    assert "project points\n" in run(project, "fit", "--config", "config.yaml")
    assert column(project, "train_loss") == torch_losses()
    for metric in ("train_loss", "val_loss", "val_acc", "lr-AdamW"):
        assert column(project, metric) == column(theirs, metric), metric

    # The complete configuration that Lightning has saved, with its defaults.
    (saved,) = theirs.glob("logs/points/version_0/config.yaml")
    (best,) = project.glob("logs/points/version_0/checkpoints/best.ckpt")
    assert "test_loss" in run(project, "test", "--config", str(saved), f"--ckpt_path={best}")


def test_the_names_of_the_module_are_those_of_lightning() -> None:
    theirs = pytest.importorskip("lightning.pytorch.cli")
    ours = importlib.import_module("phalanx.compat.lightning.cli")
    assert [name for name in ours.__all__ if not hasattr(theirs, name)] == []
    assert all(hasattr(ours, name) for name in ours.__all__)
    given = {name for name in dir(theirs.LightningCLI) if not name.startswith("_")}
    # The parser has a method for it.
    assert {name for name in given if not hasattr(ours.LightningCLI, name)} == {"link_optimizers_and_lr_schedulers"}
