"""Tokens as weights: the mean loss per token, whatever the length of the documents.

A batch of short documents has fewer tokens than one of long documents. ``batch_weight`` returns the number of tokens,
and phalanx weights each micro-batch and each rank by it. The check: two micro-batches in a window give the same weights
as one batch of all documents, which a mean of two means does not.
"""

from __future__ import annotations

from typing import Any

import torch
from tasks import NO_FILES, recipe_options, standard_library
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule, seed_everything

PADDING = -100


class NextByte(TrainModule):
    """Predicts a byte from the one before it."""

    def __init__(self, is_weighted: bool = True) -> None:
        super().__init__()
        self.is_weighted = is_weighted
        self.embedding = nn.Embedding(128, 32)
        self.head = nn.Linear(32, 128)

    def batch_weight(self, batch: Tensor) -> Tensor | int:
        return (batch[:, 1:] != PADDING).sum() if self.is_weighted else 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.embedding(batch[:, :-1].clamp(min=0)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def collate(documents: list[str]) -> Tensor:
    """Return the bytes of documents as ``[documents, longest]``."""
    rows = [torch.tensor(list(document.encode())) for document in documents]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def fit(documents: list[str], batch_size: int, window: int, is_weighted: bool = True) -> Tensor:
    """Return the weights of the last layer after one epoch."""
    seed_everything(1)
    model = NextByte(is_weighted)
    loader: Any = DataLoader(documents, batch_size, collate_fn=collate)  # type: ignore[arg-type]
    Trainer(max_epochs=1, accumulate_grad_batches=window, **NO_FILES).fit(model, loader)
    return model.head.weight.detach()


def main() -> None:
    options = recipe_options(__doc__)
    documents = standard_library(num_files=4)[: 64 if options.short else 640]
    expected = fit(documents, batch_size=16, window=1)
    weighted = fit(documents, batch_size=8, window=2)
    mean_of_means = fit(documents, batch_size=8, window=2, is_weighted=False)
    print(f"distance from whole batches: {torch.dist(weighted, expected):.1e} weighted by tokens, ", end="")
    print(f"{torch.dist(mean_of_means, expected):.1e} without")
    torch.testing.assert_close(weighted, expected)
    assert torch.dist(mean_of_means, expected) > 100 * torch.dist(weighted, expected)


if __name__ == "__main__":
    main()
