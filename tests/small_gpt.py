"""A small transformer with all that sharding has to cope with, and its training written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from models import plain_steps, step_means, windows_of
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies import FSDPStrategy

VOCABULARY, WIDTH, LENGTH = 13, 8, 6
STEPS = 20
GLOBAL_BATCH = 12


class Block(nn.Module):
    """Attention and a feed-forward layer, with a bias of odd size and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.down.bias.requires_grad = False
        self.calls: Tensor
        self.mask: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose(-1, -2) / WIDTH**0.5 + self.mask
        x = x + self.out(scores.softmax(-1) @ self.value(y))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return output


class SmallGPT(nn.Module):
    """Tied embeddings, a parameter of its own, one that no step uses, one smaller than the number of ranks."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)) * self.scale
        return logits


def small_gpt(layers: int = 3, seed: int = 7) -> SmallGPT:
    """Return the model with fixed initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallGPT(layers)


def token_data(count: int = 960) -> TensorDataset:
    """Return sequences of tokens and the token that follows each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return TensorDataset(tokens, (tokens * 3 + tokens.roll(1, 1)) % VOCABULARY)


def token_loader(batch_size: int, count: int = 960) -> DataLoader[Any]:
    """Return a loader over ``token_data``."""
    return DataLoader(token_data(count), batch_size=batch_size)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Language(TrainModule):
    """Trains ``small_gpt`` and notes the loss of every micro-batch."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.gpt = small_gpt(layers)
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.gpt(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.gpt(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.gpt(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


class Parallel(Language):
    """Splits the feed-forward layers over ranks, and the tied embedding over its odd number of tokens."""

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return {
            "gpt.blocks.*.up": ColwiseParallel(),
            "gpt.blocks.*.down": RowwiseParallel(),
            "gpt.embedding": RowwiseParallel(input_layouts=Replicate()),
            "gpt.head": ColwiseParallel(output_layouts=Replicate()),
        }


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW in two groups, of weights and of the rest."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in trained if each.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.02,
    )


def by_hand(windows: Sequence[int], clip: float | None, steps: int = STEPS) -> tuple[Tensor, dict[str, Tensor]]:
    """Train on global batches of 12 times the window in plain torch; return losses and weights."""
    x, y = token_data().tensors
    gpt = small_gpt()
    batches = windows_of(GLOBAL_BATCH, windows, steps)
    losses = plain_steps(optimizer_of(gpt), lambda rows: loss_of(gpt(x[rows]), y[rows]), batches, clip)
    return torch.tensor(losses), weights(gpt)


def weights(gpt: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in gpt.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare weights by name."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=partial("{} {}".format, name))


def per_update(ranks: Sequence[Sequence[float]], windows: Sequence[int], steps: int = STEPS) -> Tensor:
    """Return the mean loss of each update from the losses of each rank's micro-batches."""
    return step_means(ranks, [windows[step % len(windows)] for step in range(steps)]).float()


def connected(strategy: FSDPStrategy, precision: str = "32-true") -> FSDPStrategy:
    """Return a strategy that has met the other ranks."""
    strategy.connect("cpu", 1, resolve_precision(precision))
    return strategy
