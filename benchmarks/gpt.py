"""A small GPT with tied embeddings, the model for comparing strategies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 512, 64


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states, [batch, length, width]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.mix(self.norm_attention(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        widened: Tensor = x + self.mlp(self.norm_mlp(x))
        return widened


class GPT(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(
        self, layers: int = 4, width: int = 128, heads: int = 4, vocabulary: int = VOCABULARY, length: int = LENGTH
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss over the tokens that have a next one."""
    logits = model(tokens)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(count: int, rows: int = 8, vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Return ``count`` batches of random tokens [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (rows, LENGTH), generator=generator) for _ in range(count)]
