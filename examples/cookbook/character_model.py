"""Language model: predict the next character of Python's standard library.

Documents are joined and cut into sequences of one length. ``batch_weight`` makes throughput count tokens. ``gpt.py`` in
the folder above is the larger version, with a schedule, accumulation and samples. The check: the loss is lower than the
entropy of single characters, so the model uses those before.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from tasks import NO_FILES, recipe_options, standard_library
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule, seed_everything

LENGTH = 64


class CharacterModel(TrainModule):
    """An embedding, a GRU and a linear layer over the 128 characters of ASCII."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def batch_weight(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=batch[:, 1:].numel())

    def _loss(self, batch: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(batch[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    text = "\n\n".join(standard_library(num_files=8 if options.short else 60))
    tokens = torch.tensor(list(text.encode()))
    sequences = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    training, validation = sequences[sequences.shape[0] // 10 :], sequences[: sequences.shape[0] // 10]
    trainer = Trainer(max_steps=60 if options.short else 1000, gradient_clip_val=1.0, **NO_FILES)
    loader: Any = DataLoader(training, batch_size=32, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(CharacterModel(), loader, DataLoader(validation, batch_size=64))  # type: ignore[arg-type]

    counts = Counter(text)
    entropy = -sum(count / len(text) * math.log(count / len(text)) for count in counts.values())
    loss = float(trainer.callback_metrics["val_loss"])
    print(f"validation loss {loss:.3f} nats a character; {entropy:.3f} for the frequencies of characters alone")
    assert loss < entropy - 0.3


if __name__ == "__main__":
    main()
