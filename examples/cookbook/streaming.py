"""Streaming data: an iterable dataset, resumed in the middle of an epoch.

A resumed fit reads the samples that were consumed again and drops them, so the dataset needs no state of its own. It
must yield the same samples in the same order in each run: here the order depends on the epoch alone. The check: a fit
that was interrupted ends with the weights of one that was not, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tasks import NO_FILES, DigitClassifier, digits, recipe_options, same_weights
from torch.utils.data import DataLoader, IterableDataset

from phalanx import Callback, Trainer, TrainModule, seed_everything


class DigitStream(IterableDataset[Any]):
    """Yields the digits in an order that differs in each epoch. phalanx calls ``set_epoch``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        data = digits()
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        return (data[index] for index in order.tolist())


class StopAt(Callback):
    """Saves a checkpoint after a step, and stops the fit."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.request_stop("the recipe interrupts this fit")


def fit(count: int, *callbacks: Callback, ckpt_path: Path | None = None) -> DigitClassifier:
    """Train for two epochs; return the module."""
    seed_everything(1)
    module = DigitClassifier()
    trainer = Trainer(max_epochs=2, callbacks=list(callbacks), **NO_FILES)
    trainer.fit(module, DataLoader(DigitStream(count), batch_size=32), ckpt_path=ckpt_path)
    return module


def main() -> None:
    options = recipe_options(__doc__)
    count = 320 if options.short else 1600
    interrupted = Path(options.out) / "streaming" / "interrupted.ckpt"
    undisturbed = fit(count)
    stopped = fit(count, StopAt(count // 32 + 3, interrupted))
    resumed = fit(count, ckpt_path=interrupted)
    print(f"interrupted after 3 batches of the 2nd epoch; equal after resuming: {same_weights(resumed, undisturbed)}")
    assert same_weights(resumed, undisturbed)
    assert not same_weights(stopped, undisturbed)


if __name__ == "__main__":
    main()
