"""Handwritten digits: a small convolutional network on scikit-learn's 1,797 images of 8 x 8 pixels.

    python examples/digits.py
    python examples/digits.py --strategy ddp --devices 2
    python examples/digits.py --precision bf16-mixed

Shows a typical run: a progress bar, two loggers, saving the best checkpoint, early stopping, and a test on held-out
data. Requires scikit-learn: ``pip install -c constraints.txt '.[examples]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.callbacks import EarlyStopping, ModelCheckpoint
from phalanx.loggers import CSVLogger, TensorBoardLogger

Batch = list[Tensor]


class DigitClassifier(TrainModule):
    """A network of two convolutions and a linear layer. Inputs are ``[batch, 1, 8, 8]``, labels ``[batch]``."""

    def __init__(self, width: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``[batch, 10]``."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", accuracy(logits, labels), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.log("test_accuracy", accuracy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of correct predictions."""
    return (logits.argmax(dim=1) == labels).float().mean()


def load_data(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    """Return the loaders for training, validation and test. The split is the same on all ranks and in all runs."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0,
        torch.tensor(labels, dtype=torch.int64),
    )
    training, validation, test = random_split(data, [0.7, 0.1, 0.2], torch.Generator().manual_seed(0))
    return (
        DataLoader(training, batch_size, shuffle=True),
        DataLoader(validation, 256),
        DataLoader(test, 256),
    )


def main() -> None:
    """Train, test the best checkpoint, and print the results."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--strategy", default="auto", help="how to distribute work over ranks, such as single or ddp")
    parser.add_argument("--devices", default="auto", help="number of ranks on this machine")
    parser.add_argument("--precision", default="32-true", help="such as 32-true or bf16-mixed")
    parser.add_argument("--epochs", type=int, default=30, help="maximum number of epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch on each rank")
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train for a few epochs only, as a quick check")
    options = parser.parse_args()

    seed_everything(1)
    training, validation, test = load_data(options.batch_size)
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        precision=options.precision,
        max_epochs=4 if options.short else options.epochs,
        default_root_dir=options.out,
        log_every_n_steps=5,
        logger=[TensorBoardLogger(name="digits"), CSVLogger(name="digits")],
        callbacks=[
            EarlyStopping("val_accuracy", mode="max", patience=6),
            ModelCheckpoint(monitor="val_accuracy", mode="max"),
        ],
    )
    trainer.fit(DigitClassifier(), training, validation)
    [result] = trainer.test(dataloaders=test, ckpt_path="best", verbose=False)

    trainer.print(f"test accuracy: {result['test_accuracy']:.2%} after {trainer.current_epoch} epochs")
    trainer.print(f"logs and checkpoints: {trainer.run_dir}")


if __name__ == "__main__":
    main()
