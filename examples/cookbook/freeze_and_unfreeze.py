"""Freeze and unfreeze: train a new head first, then the backbone too, with a smaller learning rate.

The backbone is trained on the even digits first. ``BackboneFinetuning`` freezes it, and unfreezes it in a later epoch.
The check: its weights stay as they are, bit for bit, until that epoch, and change then.
"""

from __future__ import annotations

from typing import Any

from tasks import NO_FILES, DigitClassifier, digit_loaders, digits, recipe_options
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, Trainer, seed_everything
from phalanx.callbacks import BackboneFinetuning

UNFREEZE_AT = 2


class BackboneHistory(Callback):
    """Records the sum of the backbone's weights at the end of each epoch."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.sums.append(backbone_sum(module))


def backbone_sum(module: DigitClassifier) -> float:
    """Return the sum of the backbone's weights."""
    return sum(float(each.double().sum()) for each in module.backbone.parameters())


def pretrained(epochs: int) -> DigitClassifier:
    """Return a classifier that has seen the even digits only."""
    images, labels = digits().tensors
    even = TensorDataset(images[labels % 2 == 0], labels[labels % 2 == 0])
    module = DigitClassifier()
    Trainer(max_epochs=epochs, **NO_FILES).fit(module, DataLoader(even, batch_size=64, shuffle=True))
    return module


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    module = pretrained(epochs=2 if options.short else 10)
    module.head.reset_parameters()
    before = backbone_sum(module)

    history = BackboneHistory()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=UNFREEZE_AT, verbose=True)
    trainer = Trainer(max_epochs=UNFREEZE_AT + 2, callbacks=[finetuning, history], **NO_FILES)
    trainer.fit(module, *digit_loaders())
    print(f"sum of the backbone's weights by epoch: {[round(each, 3) for each in history.sums]}, before {before:.3f}")
    assert history.sums[:UNFREEZE_AT] == [before] * UNFREEZE_AT
    assert all(each != before for each in history.sums[UNFREEZE_AT:])
    assert trainer.callback_metrics["val_accuracy"] > 0.5


if __name__ == "__main__":
    main()
