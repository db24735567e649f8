"""Weight averaging: an exponential moving average (EMA) of the weights, used for validation and at the end.

``EMAWeightAveraging`` updates the average after each optimizer step. The check: the average equals the one that a
callback computes by hand, and training itself is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options, same_weights
from torch import Tensor

from phalanx import Callback, Trainer, seed_everything
from phalanx.callbacks import EMAWeightAveraging

DECAY = 0.99


class AverageByHand(Callback):
    """Averages the weights of the head."""

    def __init__(self) -> None:
        self.average: Tensor | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = module.head.weight.detach()
        before = weight if self.average is None else self.average
        self.average = DECAY * before + (1 - DECAY) * weight


def fit(epochs: int, *callbacks: Callback) -> tuple[DigitClassifier, float]:
    """Return the module after a fit, and its accuracy."""
    seed_everything(1)
    training, validation = digit_loaders()
    module = DigitClassifier()
    trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), **NO_FILES)
    trainer.fit(module, training, validation)
    return module, float(trainer.callback_metrics["val_accuracy"])


def main() -> None:
    options = recipe_options(__doc__)
    epochs = 4 if options.short else 20
    by_hand = AverageByHand()
    plain, plain_accuracy = fit(epochs)
    averaged, accuracy = fit(epochs, EMAWeightAveraging(decay=DECAY), by_hand)
    print(f"accuracy {plain_accuracy:.3f} with the last weights, {accuracy:.3f} with their average")
    assert by_hand.average is not None
    torch.testing.assert_close(averaged.head.weight.detach(), by_hand.average)
    assert not same_weights(plain, averaged)
    unchanged, _ = fit(epochs, EMAWeightAveraging(decay=DECAY, average_at_end=False))
    assert same_weights(plain, unchanged)


if __name__ == "__main__":
    main()
