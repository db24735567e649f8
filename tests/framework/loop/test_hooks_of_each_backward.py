"""Hooks after each backward pass of a window see reduced gradients, also where ranks have fewer micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule


class Noting(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.calls = nn.Linear(4, 1), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        return loss

    def batch_weight(self, batch: Any) -> int:
        return len(batch[0])

    def on_after_backward(self) -> None:
        self.calls += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(9, 4, generator=generator), torch.randn(9, 1, generator=generator))


def trained() -> tuple[Tensor, int]:
    module = Noting()
    trainer = silent_trainer(devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(module, DataLoader(rows(), batch_size=2))
    return weights_of(module), module.calls


def test_ranks_with_fewer_micro_batches_than_others() -> None:
    module = Noting()
    optimizer = module.configure_optimizers()
    x, y = rows().tensors
    module.training_step((x, y), 0).backward()
    optimizer.step()
    (first, calls), (second, others) = run_on_ranks(2, trained)
    torch.testing.assert_close(first, weights_of(module), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert (calls, others) == (3, 2)
