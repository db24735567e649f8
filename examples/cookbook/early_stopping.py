"""Early stopping: end the fit when a metric no longer improves, and use the best weights.

``EarlyStopping`` counts validations without improvement, and ``ModelCheckpoint`` saves the best one. The check: the fit
ends ``patience`` epochs after the best one, and the loaded weights have the best loss.
"""

from __future__ import annotations

from typing import Any

from tasks import DigitClassifier, digit_loaders, recipe_options

from phalanx import Callback, Trainer, TrainModule, seed_everything
from phalanx.callbacks import EarlyStopping, ModelCheckpoint

PATIENCE = 2


class History(Callback):
    """Records the validation loss of each epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    # A high learning rate, so that the model soon learns the training images by heart.
    module = DigitClassifier(width=128, learning_rate=0.02)
    history = History()
    stopping = EarlyStopping("val_loss", patience=PATIENCE)
    saver = ModelCheckpoint(monitor="val_loss")
    trainer = Trainer(
        max_epochs=100,
        default_root_dir=options.out,
        logger=False,
        callbacks=[stopping, saver, history],
        enable_progress_bar=not options.short,
    )
    training, validation = digit_loaders()
    trainer.fit(module, training, validation)
    losses = list(history.losses)
    [metrics] = trainer.validate(dataloaders=validation, ckpt_path="best", verbose=False)

    best = losses.index(min(losses))
    print(f"best epoch {best} of {len(losses)}: validation loss {metrics['val_loss']:.4f}")
    assert len(losses) < 100
    assert len(losses) - 1 - best == PATIENCE
    assert abs(metrics["val_loss"] - min(losses)) < 1e-6


if __name__ == "__main__":
    main()
