"""Train two networks against each other: one draws digits of 8 x 8 pixels, the other finds what it drew."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DataModule, Trainer, TrainModule


class Digits(DataModule):
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.tensor(load_digits().data / 16).float()), 32, shuffle=True)


class GAN(TrainModule):
    automatic_optimization = False

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        drawn = self.generator(torch.randn_like(batch[0]))
        critic_loss = (softplus(-self.critic(batch[0])) + softplus(self.critic(drawn.detach()))).mean()
        for optimizer, name in zip(self.optimizers(), ("critic", "generator"), strict=True):
            loss = critic_loss if name == "critic" else softplus(-self.critic(drawn)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"train/{name}", loss, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), 1e-3, (0.5, 0.9)) for net in (self.critic, self.generator)]


if __name__ == "__main__":
    Trainer(max_epochs=20, log_every_n_steps=10).fit(GAN(), datamodule=Digits())
