"""One small model and its data, trained by other libraries and by phalanx alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

GLOBAL_BATCH = 8
NUM_BATCHES = 10
SAVED_AFTER = 4
FOLLOWING = 5


class Net(nn.Module):
    """Tied and frozen weights, a buffer, and numbers of elements that no two ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 7))
        self.embed = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5)
        self.body = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.body(self.frozen(self.embed(tokens)))) * self.scale)
        logits: Tensor = self.head(self.out(hidden))
        return logits


def seeded_net() -> Net:
    """Return the model with its first weights."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch."""
    tokens, targets = batch
    return nn.functional.cross_entropy(net(tokens), targets)


def data() -> TensorDataset:
    """Return ``NUM_BATCHES`` global batches."""
    generator = torch.Generator().manual_seed(1)
    count = NUM_BATCHES * GLOBAL_BATCH
    return TensorDataset(*torch.randint(0, 11, (2, count), generator=generator))


def loader(batch_size: int = GLOBAL_BATCH, start: int = 0) -> DataLoader[Any]:
    """Return a loader that does not shuffle, from a sample on."""
    return DataLoader(Subset(data(), range(start, NUM_BATCHES * GLOBAL_BATCH)), batch_size=batch_size)


def global_batch(number: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """Return a rank's part of a global batch."""
    size = GLOBAL_BATCH // world_size
    begin = number * GLOBAL_BATCH + rank * size
    tokens, targets = data()[begin : begin + size]
    return tokens, targets


def optimizer_of(module: nn.Module, groups: bool) -> AdamW:
    """Return an optimizer of what is trained: in one group, or matrices apart from vectors, vectors first."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not groups:
        return AdamW(trained, lr=1e-2)
    vectors, matrices = ([p for p in trained if (p.dim() > 1) is wanted] for wanted in (False, True))
    return AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}], lr=1e-2)


def schedule_of(optimizer: AdamW) -> StepLR:
    """Return a schedule that halves the learning rate every three updates."""
    return StepLR(optimizer, 3, 0.5)
