"""The training that ``phalanx selftest`` compares: a Trainer's under a strategy, and the same one in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .. import Trainer, TrainModule

STEPS, WINDOW, GLOBAL_BATCH = 6, 2, 8
_FEATURES, _WIDTH, _CLIP = 16, 32, 1.0


class Residual(TrainModule):
    """A regression by two residual blocks, which strategies that shard split on their own. Inputs: ``[batch, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.enter = nn.Linear(_FEATURES, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(2)
        )
        self.leave = nn.Linear(_WIDTH, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator) - parameter)
        self.losses: list[Tensor] = []
        self.result: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Return the mean squared error."""
        hidden = self.enter(batch[0])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        error: Tensor = self.leave(hidden).squeeze(1) - batch[1]
        return error.square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_end(self) -> None:
        self.result = _by_step(self.all_gather(torch.stack(self.losses)).reshape(-1, len(self.losses)).mean(dim=0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With a large eps the update depends on the scale of the gradients: Adam alone would hide a wrong one.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def train_with(strategy: Any, num_ranks: int, device_type: str) -> list[float]:
    """Train under a strategy; return the loss of each optimizer step, the mean over ranks. Collective."""
    module = Residual()
    trainer = Trainer(
        strategy=strategy,
        devices=num_ranks,
        accelerator=device_type,
        max_steps=STEPS,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=_CLIP,
        barebones=True,
        verbose=False,
    )
    trainer.fit(module, DataLoader(_data(), GLOBAL_BATCH // num_ranks))
    return module.result


def train_by_hand(device_type: str) -> list[float]:
    """Train in this process with plain torch; return the loss of each optimizer step."""
    module = Residual().to(device_type)
    optimizer = module.configure_optimizers()
    losses = []
    for number, rows in enumerate(DataLoader(_data(), GLOBAL_BATCH)):
        loss = module.loss([each.to(device_type) for each in rows])
        losses.append(loss.detach())
        (loss / WINDOW).backward()
        if number % WINDOW == WINDOW - 1:
            nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return _by_step(torch.stack(losses))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * WINDOW * GLOBAL_BATCH, _FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].prod(dim=1) + inputs.sum(dim=1))


def _by_step(losses: Tensor) -> list[float]:
    values: list[float] = losses.double().reshape(STEPS, WINDOW).mean(dim=1).tolist()
    return values
