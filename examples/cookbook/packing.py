"""Documents of different lengths: padded, in batches by tokens, and packed.

One update with all documents is made three times: in padded batches, in batches of similar lengths (``BatchByTokens``),
and in sequences of whole documents (``Packed``). ``batch_weight`` is the number of targets. The check: all three give
the same weights, with fewer and fewer tokens of padding.
"""

from __future__ import annotations

from typing import Any

import torch
from tasks import NO_FILES, recipe_options, standard_library
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import BatchByTokens, Packed, Trainer, TrainModule, seed_everything

IGNORED = -100


class NextByte(TrainModule):
    """Predicts a byte from the one before it. Counts the tokens that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.head = nn.Linear(32, 128)
        self.computed = 0

    def batch_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.computed += batch["input_ids"].numel()
        logits = self.head(self.embedding(batch["input_ids"][:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def pad(documents: list[Tensor]) -> dict[str, Tensor]:
    """Return documents as ``[documents, longest]``."""
    labels = nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def fit(loader: Any) -> NextByte:
    """Make one update with all batches of a loader."""
    seed_everything(1)
    model = NextByte()
    Trainer(max_epochs=1, accumulate_grad_batches=len(loader), **NO_FILES).fit(model, loader)
    return model


def main() -> None:
    options = recipe_options(__doc__)
    texts = standard_library(num_files=4)[: 64 if options.short else 640]
    documents: Any = [torch.tensor(list(text.encode())) for text in texts]
    longest = max(len(document) for document in documents)
    by_tokens = BatchByTokens(documents, max_tokens=4 * longest)
    loaders = {
        "padded": DataLoader(documents, batch_size=8, collate_fn=pad),
        "by tokens": DataLoader(documents, batch_sampler=by_tokens, collate_fn=pad),
        "packed": DataLoader(Packed(documents, longest, cut=False), batch_size=4),
    }
    models = {name: fit(loader) for name, loader in loaders.items()}
    used = sum(len(document) for document in documents)
    for name, model in models.items():
        print(f"{name}: {model.computed / used - 1:.0%} padding")
        torch.testing.assert_close(model.head.weight, models["padded"].head.weight)
    assert models["packed"].computed < models["padded"].computed


if __name__ == "__main__":
    main()
