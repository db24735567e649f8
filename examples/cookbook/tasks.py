"""The shared tasks: the small models, the data and the options that the recipes use.

Digits are scikit-learn's 1,797 images of 8 x 8 pixels, and text is the source of Python's standard library, so no
recipe downloads anything. Run a recipe from any folder: ``python examples/cookbook/early_stopping.py``. Each takes
``--out``, the directory for its files, and ``--short``, which trains for a moment only.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule

# For fits whose result is in memory: no logs, no checkpoints, no output.
NO_FILES: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "verbose": False}


class DigitClassifier(TrainModule):
    """A network of two linear layers. Inputs are ``[batch, 64]``, labels ``[batch]``."""

    def __init__(self, width: int = 64, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.learning_rate)


def digits() -> TensorDataset:
    """Return all images ``[1797, 64]``, with values from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels))


def digit_loaders(batch_size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of 1,500 images for training and of the others for validation."""
    images, labels = digits().tensors
    training, validation = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    return DataLoader(training, batch_size, shuffle=True), DataLoader(validation, 256)


def standard_library(num_files: int) -> list[str]:
    """Return the paragraphs of modules of Python's standard library, in alphabetical order of the files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return [paragraph for paragraph in text.split("\n\n") if paragraph.isascii() and len(paragraph) > 20]


def recipe_options(description: str | None) -> argparse.Namespace:
    """Parse the command line of a recipe."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train for a moment only, as a quick check")
    return parser.parse_args()


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two modules have the same weights, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
