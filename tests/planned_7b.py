"""A program that trains a language model of 7 billion parameters, in the shape of Llama 7B, to be planned:

phalanx plan --ranks 256 --device-memory 80GB --rehearse tests/planned_7b.py
"""

from __future__ import annotations

from typing import Any

import torch
from language_model import attention
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule

WORDS, WIDTH, HIDDEN, HEADS, BLOCKS, LENGTH = 32_000, 4096, 11_008, 32, 32, 4096


class Block(nn.Module):
    """Causal attention and a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + attention(self, self.norm(x), WIDTH // HEADS)
        normed = self.norm_mlp(x)
        added: Tensor = self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return x + added


class Llama(TrainModule):
    """Predicts the next token."""

    def configure_model(self) -> None:
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def cut_sequences(self, batch: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        return part(batch[:, :-1]), part(batch[:, 1:])

    def batch_weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return batch[1].numel()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        columns, rows = ("query", "key", "value", "gate", "up"), ("project", "down")
        plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
        return plan | {f"blocks.*.{name}": RowwiseParallel() for name in rows}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


if __name__ == "__main__":
    tokens = torch.zeros(512, LENGTH + 1, dtype=torch.long)
    trainer = Trainer(strategy="fsdp", devices=8, precision="bf16-mixed", gradient_clip_val=1.0, max_steps=1)
    trainer.fit(Llama(), DataLoader(tokens, batch_size=1))  # type: ignore[arg-type]
