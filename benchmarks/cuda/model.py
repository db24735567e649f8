"""The model of every side and its batches, equal for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..gpt import GPT
from .cells import LEAD, Phase, Size

_DIFFERENT = 4


class LanguageModel(nn.Module):
    """A GPT whose forward pass returns the mean loss of tokens [rows, length]. Losses are computed in fp32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gpt = GPT(size.layers, size.width, size.heads, size.vocabulary, size.length)
        for embedding in (self.gpt.embed, self.gpt.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each next token."""
        logits: Tensor = self.gpt(tokens)
        # Moving the targets, and not the logits, avoids a copy of the logits.
        targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(size: Size, device: torch.device) -> LanguageModel:
    """Return the model on a device, with the same weights in each process."""
    with device:
        return LanguageModel(size)


def optimizer_of(module: nn.Module, size: Size) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(module.parameters(), lr=size.learning_rate, fused=True)


def compile_blocks(model: LanguageModel) -> None:
    """Compile each block, as ``Trainer(compile="blocks")`` does."""
    blocks = model.gpt.blocks
    for index, block in enumerate(blocks):
        # The result has the hooks of DDP and FSDP outside of the compiled code.
        compiled: Any = torch.compile(block)
        blocks[index] = compiled


class Batches:
    """A loader of prepared batches in pinned memory, so that loading costs nothing.

    Losses are compared on one batch, which is repeated so that the loss falls; other phases use four batches in turn.
    """

    def __init__(self, size: Size, phases: Sequence[Phase], pins: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def made(rows: int, length: int) -> list[Tensor]:
            found = [torch.randint(size.vocabulary, (rows, length), generator=generator) for _ in range(_DIFFERENT)]
            return [tokens.pin_memory() for tokens in found] if pins else found

        full, short = made(size.rows, size.length), made(*size.short)
        self._order: list[Tensor] = []
        for phase in phases:
            if phase.kind == "losses":
                self._order += full[:1] * phase.steps
            else:
                prepared = short if phase.is_short else full
                self._order += [prepared[index % _DIFFERENT] for index in range(LEAD + phase.steps)]
        # The step that ends the last phase.
        self._order.append(full[0])

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._order)
