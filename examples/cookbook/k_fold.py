"""Cross-validation: train k models, each one validated on another part of the data.

Each fold is a fit of its own with a new module, as a fit continues from the weights that a module has. The check: each
image is validated exactly once, and each model has learned.
"""

from __future__ import annotations

from statistics import mean, stdev

import torch
from tasks import NO_FILES, DigitClassifier, digits, recipe_options
from torch.utils.data import DataLoader, Subset

from phalanx import Trainer, seed_everything


def folds(size: int, count: int) -> list[list[int]]:
    """Return ``count`` disjoint lists of indices in random order."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    return [order[start::count] for start in range(count)]


def accuracy_of_fold(validation: list[int], epochs: int) -> float:
    """Return the accuracy on some images of a model that is trained on all others."""
    seed_everything(1)
    data = digits()
    training = sorted(set(range(len(data))) - set(validation))
    trainer = Trainer(max_epochs=epochs, **NO_FILES)
    trainer.fit(
        DigitClassifier(),
        DataLoader(Subset(data, training), batch_size=32, shuffle=True),
        DataLoader(Subset(data, validation), batch_size=256),
    )
    return float(trainer.callback_metrics["val_accuracy"])


def main() -> None:
    options = recipe_options(__doc__)
    parts = folds(len(digits()), count=3 if options.short else 5)
    accuracies = [accuracy_of_fold(part, epochs=3 if options.short else 15) for part in parts]
    print(f"accuracy {mean(accuracies):.3f} +- {stdev(accuracies):.3f} over {len(parts)} folds")
    assert sorted(index for part in parts for index in part) == list(range(len(digits())))
    assert min(accuracies) > 0.8


if __name__ == "__main__":
    main()
