"""Classify handwritten digits: scikit-learn's 1,797 images of 8 x 8 pixels. Start with ``python train.py``."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset

from phalanx import DataModule, Trainer, TrainModule


class Digits(DataModule):
    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        self.data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(Subset(self.data, range(1500)), 32, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(Subset(self.data, range(1500, 1797)), 256)


class Classifier(TrainModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/accuracy", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    Trainer(max_epochs=10, log_every_n_steps=10).fit(Classifier(), datamodule=Digits())
