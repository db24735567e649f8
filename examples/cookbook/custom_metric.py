"""Custom metric: count over all batches and ranks with torchmetrics.

The mean of the accuracies of batches is not the accuracy. A ``torchmetrics.Metric`` adds up counts, and phalanx reduces
them over the ranks at the end of the epoch. The check: the logged value equals the one that is computed from all
predictions at once.
"""

from __future__ import annotations

from typing import Any

import torch
from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options
from torch import Tensor
from torchmetrics import Metric

from phalanx import Trainer, seed_everything


class WorstClassAccuracy(Metric):
    """The lowest accuracy among the classes."""

    hits: Tensor
    total: Tensor

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("hits", default=torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("total", default=torch.zeros(num_classes), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        self.total += torch.bincount(labels, minlength=self.num_classes)
        self.hits += torch.bincount(labels[predicted == labels], minlength=self.num_classes)

    def compute(self) -> Tensor:
        return (self.hits / self.total.clamp(min=1)).min()


class Measured(DigitClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.worst = WorstClassAccuracy()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.worst.update(self(images).argmax(dim=1), labels)
        self.log("worst_class", self.worst)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self(batch[0]).argmax(dim=1)


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    training, validation = digit_loaders()
    module = Measured()
    trainer = Trainer(max_epochs=5 if options.short else 20, **NO_FILES)
    trainer.fit(module, training, validation)
    logged = float(trainer.callback_metrics["worst_class"])
    predicted = torch.cat(trainer.predict(module, validation) or [])
    labels = torch.cat([labels for _, labels in validation])
    by_hand = min(float((predicted[labels == digit] == digit).float().mean()) for digit in range(10))
    print(f"accuracy of the worst class: {logged:.4f}, by hand {by_hand:.4f}")
    assert abs(logged - by_hand) < 1e-6
    assert by_hand > 0.2


if __name__ == "__main__":
    main()
