"""A small language model whose ranks share sequences, and its training written by hand in one process."""

from __future__ import annotations

from typing import Any

import torch
from language_model import attention, split_of_blocks
from models import plain_steps
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule

VOCABULARY, WIDTH, HEADS, LENGTH = 29, 16, 4, 12
IGNORED = -100
ROWS = 640
"""The number of sequences, and that for models with experts, whose batches are larger."""


class Experts(nn.Module):
    """Perceptrons, stacked by expert."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.widen = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 4)
        self.narrow = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 6)
        # Of sizes that a number of ranks does not divide.
        self.shift = nn.Parameter(torch.zeros(count, 3))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = (index == expert).nonzero(as_tuple=True)
            narrowed = nn.functional.gelu(hidden[token] @ self.widen[expert]) @ self.narrow[expert]
            mixed = mixed.index_add(0, token, (narrowed + self.shift[expert].sum()) * weights[token, place, None])
        return mixed


class Mixture(nn.Module):
    """Two experts for each token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts, bias=False), Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.flatten(0, -2)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        mixed: Tensor = self.experts(hidden, index, weights / weights.sum(-1, keepdim=True))
        return mixed.view_as(x)


class Block(nn.Module):
    """Causal attention and a perceptron, or a mixture of them."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Without biases: the gradient of a key's bias is zero, which Adam would turn into steps of rounding errors.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        if experts:
            self.mixture = Mixture(experts)
        else:
            self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        x = x + attention(self, self.norm(x), WIDTH // HEADS)
        normed = self.norm_mlp(x)
        found: Tensor = self.mixture(normed) if self.experts else self.narrow(nn.functional.gelu(self.widen(normed)))
        return x + found


class LongModel(TrainModule):
    """Predicts the next token; batches are (tokens, targets), with targets that do not count."""

    def __init__(self, lr: float = 1e-2, dropout: float = 0.0, experts: int = 0, blocks: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block(experts) for _ in range(blocks))
            self.dropout = nn.Dropout(dropout)
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.lr = lr
        self.sums: list[tuple[float, float]] = []
        """For each micro-batch of a training step, the sum of this rank's losses and the number of its targets."""

    def cut_sequences(self, batch: Any, part: Any) -> Any:
        tokens, targets = batch
        return part(tokens), part(targets), part.positions(tokens)

    def batch_weight(self, batch: Any) -> int | Tensor:
        weight: Tensor = batch[1].ne(IGNORED).sum()
        return weight

    def loss(self, batch: Any) -> Tensor:
        tokens, targets, positions = batch
        x = self.dropout(self.embed(tokens) + self.places(positions))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.training:
            count = float(self.batch_weight(batch))
            self.sums.append((loss.item() * count if count else 0.0, count))
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("tokens", float(self.batch_weight(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return split_of_blocks()

    def configure_expert_parallel(self) -> list[str]:
        return ["blocks.*.mixture.experts"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def rows(count: int = ROWS, padded: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Return the first ``count`` sequences and their targets, which without padding all count.

    Of four padded ones in turn, two end early, many of them in the first half, and two begin with a prompt without
    targets, which is longer than that.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    tokens[:, 1::2] = (tokens[:, :-1:2] * 3 + 1) % VOCABULARY
    targets = tokens[:, 1:].clone()
    if padded:
        ends = torch.randint(3, LENGTH + 1, (ROWS,), generator=generator)
        places, is_prompt = torch.arange(LENGTH), (torch.arange(ROWS) // 2 % 2 == 1)[:, None]
        targets[~is_prompt & (places >= ends[:, None])] = IGNORED
        targets[is_prompt & (places < LENGTH // 2 + 1)] = IGNORED
    return list(zip(tokens[:count, :-1], targets[:count], strict=True))


def loader(batch_size: int, count: int = ROWS, padded: bool = True) -> DataLoader[Any]:
    """Return a loader over ``rows``."""
    return DataLoader(rows(count, padded), batch_size=batch_size)  # type: ignore[arg-type]


def by_hand(
    windows: int, clip: float | None, steps: int, batch_size: int, lr: float = 1e-2, experts: int = 0, blocks: int = 2
) -> tuple[list[float], LongModel]:
    """Train on global batches of ``windows * batch_size`` rows; return the loss of each step and the model."""
    module = LongModel(lr, experts=experts, blocks=blocks)
    size = windows * batch_size
    losses = plain_steps(
        module.configure_optimizers(),
        lambda batch: module.loss((*batch, torch.arange(LENGTH))),
        loader(size, steps * size),
        clip,
    )
    return losses, module
