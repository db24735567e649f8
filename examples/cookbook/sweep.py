"""Hyperparameter sweep: train one model for each combination, and keep the best one.

A sweep is a loop over fits, each in a run directory of its own, with its hyperparameters in the checkpoint. ``phalanx
compare`` shows two of the runs side by side. ``phalanx sweep`` runs an unchanged script so, on several ranks, and
continues when it was killed: see docs/sweeps.md. The check: the best checkpoint has the hyperparameters and the loss of
the best run.
"""

from __future__ import annotations

import itertools
from typing import Any

from tasks import DigitClassifier, digit_loaders, recipe_options

from phalanx import Trainer, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.loggers import CSVLogger

SPACE: dict[str, list[Any]] = {"width": [8, 64], "learning_rate": [1e-4, 3e-3]}


def fit(epochs: int, out: str, **hyperparameters: Any) -> tuple[float, str]:
    """Train with some hyperparameters; return the lowest validation loss and the path of its checkpoint."""
    seed_everything(1)
    saver = ModelCheckpoint(monitor="val_loss")
    trainer = Trainer(
        max_epochs=epochs, default_root_dir=out, logger=CSVLogger(name="sweep"), callbacks=[saver], verbose=False
    )
    trainer.fit(DigitClassifier(**hyperparameters), *digit_loaders())
    assert saver.best_model_score is not None
    return float(saver.best_model_score), str(saver.best_model_path)


def main() -> None:
    options = recipe_options(__doc__)
    results = []
    for values in itertools.product(*SPACE.values()):
        chosen = dict(zip(SPACE, values, strict=True))
        loss, path = fit(2 if options.short else 10, options.out, **chosen)
        results.append((loss, path, chosen))
        print(f"validation loss {loss:.4f} with {chosen}")
    best_loss, best_path, chosen = min(results, key=lambda result: result[0])

    best = DigitClassifier.load_from_checkpoint(best_path)
    [metrics] = Trainer(logger=False, enable_progress_bar=False).validate(best, digit_loaders()[1], verbose=False)
    print(f"best: {best_path}")
    assert dict(best.hparams) == chosen
    assert abs(metrics["val_loss"] - best_loss) < 1e-6
    assert chosen == {"width": 64, "learning_rate": 3e-3}


if __name__ == "__main__":
    main()
