"""A small transformer with tied embeddings, and text-like data: what every strategy trains alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule

VOCABULARY, WIDTH, LENGTH, HEADS = 53, 32, 12, 4


def attention(block: Any, x: Tensor, head_width: int) -> Tensor:
    """Return causal attention by the layers of a block. Under tensor parallelism a rank has some of the heads only."""
    rows, length, _ = x.shape
    query, key, value = (
        layer(x).view(rows, length, -1, head_width).transpose(1, 2) for layer in (block.query, block.key, block.value)
    )
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    projected: Tensor = block.project(mixed.transpose(1, 2).flatten(2))
    return projected


def split_of_blocks() -> dict[str, Any]:
    """Split heads and the perceptron's width; see Shoeybi et al. 2019, "Megatron-LM"."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns, rows = ("query", "key", "value", "widen"), ("project", "narrow")
    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
    return plan | {f"blocks.*.{name}": RowwiseParallel() for name in rows}


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states, [batch, length, width]."""
        x = x + attention(self, self.norm_attention(x), WIDTH // HEADS)
        narrowed: Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm_mlp(x))))
        return x + narrowed


class LanguageModel(TrainModule):
    """Predicts the next token; notes the loss of every micro-batch."""

    order: Tensor

    def __init__(self, blocks: int = 2, lr: float = 1e-2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.arange(LENGTH), persistent=False)
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] for tokens [batch, length]."""
        x = self.embed(tokens) + self.positions(self.order[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss over the tokens that have a next one."""
        logits = self(tokens)[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        """Split heads and the perceptron's width."""
        return split_of_blocks()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW without decay of vectors."""
        return adamw(self, self.lr)


class SGDModel(LanguageModel):
    """Is updated by SGD: the size of its gradients matters, and DTensor has few operators to prepare."""

    blocks: Any

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def adamw(module: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return AdamW with two parameter groups: matrices decay, vectors do not."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def tokens(count: int = 640, seed: int = 0) -> Tensor:
    """Return ``count`` rows [count, length] of nine of the tokens, each following from the one before with some noise.

    That is soon learned: in twenty steps the loss falls by half, so that a strategy which trains otherwise is seen.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(9, (count, LENGTH), generator=generator)
    keeps = torch.rand(count, LENGTH, generator=generator) < 0.2
    for place in range(1, LENGTH):
        rows[:, place] = torch.where(keeps[:, place], rows[:, place], (rows[:, place - 1] + 2) % 9)
    return rows


def token_loader(count: int = 640, batch_size: int = 4, **arguments: Any) -> DataLoader[Any]:
    """Return a loader over ``tokens``."""
    return DataLoader(TensorDataset(tokens(count)), batch_size=batch_size, **arguments)
