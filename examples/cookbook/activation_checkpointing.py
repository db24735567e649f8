"""Activation checkpointing: compute activations again in the backward pass instead of storing them.

Call ``torch.utils.checkpoint`` around a block of the network; under ``fsdp``,
``FSDPStrategy(activation_checkpointing=True)`` does it for you. The checks: fewer bytes are stored for the backward
pass, and the weights after training are the same, bit for bit.
"""

from __future__ import annotations

import torch
from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options, same_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import Trainer, seed_everything


class Deep(DigitClassifier):
    """A classifier with several blocks. Records the bytes that are stored for the backward pass of a step."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.stored_bytes = 0

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.backbone(images)
        for block in self.blocks:
            update = checkpoint(block, hidden, use_reentrant=False) if self.is_checkpointed else block(hidden)
            hidden = hidden + update
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sizes: dict[int, int] = {}

        def store(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            loss = super().training_step(batch, batch_idx)
        self.stored_bytes = sum(sizes.values())
        return loss


def fit(is_checkpointed: bool, steps: int) -> Deep:
    """Train a few steps; return the module."""
    seed_everything(1)
    module = Deep(is_checkpointed)
    Trainer(max_steps=steps, **NO_FILES).fit(module, digit_loaders(batch_size=256)[0])
    return module


def main() -> None:
    options = recipe_options(__doc__)
    steps = 5 if options.short else 60
    plain, checkpointed = fit(False, steps), fit(True, steps)
    print(f"stored for a backward pass: {plain.stored_bytes:,} bytes, {checkpointed.stored_bytes:,} with checkpointing")
    assert checkpointed.stored_bytes < plain.stored_bytes / 2
    assert same_weights(plain, checkpointed)


if __name__ == "__main__":
    main()
