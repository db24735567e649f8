"""Several loaders: train on two data sets at once, and validate on each of them.

A dict of loaders yields a dict of batches; the shorter loader starts again until the longest one ends. Several
validation loaders are read one after the other, and each metric is logged once for each. The check: how often each data
set was read, and that both are learned.
"""

from __future__ import annotations

from typing import Any

from tasks import NO_FILES, DigitClassifier, digits, recipe_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, seed_everything


class TwoSources(DigitClassifier):
    """Learns from images as they are and from inverted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[str, int] = {"plain": 0, "inverted": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for name, (images, labels) in batch.items():
            self.batches[name] += 1
            losses.append(nn.functional.cross_entropy(self(images), labels))
        return sum(losses, start=losses[0].new_zeros(()))

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    images, labels = digits().tensors
    plain, inverted = TensorDataset(images[:1200], labels[:1200]), TensorDataset(1 - images[:400], labels[:400])
    training = {
        "plain": DataLoader(plain, batch_size=40, shuffle=True),
        "inverted": DataLoader(inverted, batch_size=40, shuffle=True),
    }
    validation = [
        DataLoader(TensorDataset(images[1200:], labels[1200:]), batch_size=256),
        DataLoader(TensorDataset(1 - images[1200:], labels[1200:]), batch_size=256),
    ]
    module = TwoSources()
    epochs = 8 if options.short else 20
    trainer = Trainer(max_epochs=epochs, **NO_FILES)
    trainer.fit(module, training, validation)
    accuracies = {name: float(value) for name, value in trainer.callback_metrics.items() if "accuracy" in name}
    print(f"batches {module.batches}, {accuracies}")
    assert module.batches == {"plain": 30 * epochs, "inverted": 30 * epochs}
    assert accuracies.keys() == {"accuracy/dataloader_idx_0", "accuracy/dataloader_idx_1"}
    assert min(accuracies.values()) > 0.6


if __name__ == "__main__":
    main()
