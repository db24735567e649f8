"""Learning-rate finder: raise the rate in each step, and take it where the loss falls fastest.

A callback sets the learning rate before each batch of a short fit on a copy of the module, and records the losses. The
check: with the rate that it finds, the model learns more in one epoch than with a hundredth of it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options

from phalanx import Callback, Trainer, TrainModule, seed_everything


class RangeTest(Callback):
    """Raises the learning rate exponentially from ``low`` to ``high``; stops if the loss is four times its minimum."""

    def __init__(self, low: float = 1e-5, high: float = 1.0, steps: int = 60) -> None:
        self.rates: list[float] = [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.rates[trainer.global_step]

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(outputs["loss"])
        # A running mean: the loss of one batch depends on its samples.
        self.losses.append(0.8 * self.losses[-1] + 0.2 * loss if self.losses else loss)
        if self.losses[-1] > 4 * min(self.losses):
            trainer.request_stop("the loss diverges")

    def suggestion(self) -> float:
        """Return the rate at which the loss falls fastest."""
        falls = [after - before for before, after in zip(self.losses, self.losses[1:], strict=False)]
        return self.rates[falls.index(min(falls))]


def find_learning_rate(module: TrainModule, loader: Any) -> float:
    """Return a learning rate for a module, which stays as it is."""
    test = RangeTest()
    Trainer(max_steps=len(test.rates), callbacks=[test], **NO_FILES).fit(copy.deepcopy(module), loader)
    return test.suggestion()


def accuracy(learning_rate: float) -> float:
    """Return the accuracy after one epoch with a learning rate."""
    seed_everything(1)
    training, validation = digit_loaders()
    module = DigitClassifier(learning_rate=learning_rate)
    trainer = Trainer(max_epochs=1, **NO_FILES)
    trainer.fit(module, training, validation)
    return float(trainer.callback_metrics["val_accuracy"])


def main() -> None:
    recipe_options(__doc__)
    seed_everything(1)
    rate = find_learning_rate(DigitClassifier(), digit_loaders()[0])
    found, slow = accuracy(rate), accuracy(rate / 100)
    print(f"learning rate {rate:.1e}: accuracy {found:.2f} after one epoch, {slow:.2f} with a hundredth of it")
    assert math.isfinite(rate)
    assert found > slow + 0.2


if __name__ == "__main__":
    main()
