"""Accumulation schedule: small batches at first, larger ones later, without more memory.

``AccumulationSchedule`` gives the number of micro-batches per optimizer step, by epoch or by step. The check: the
number of samples of each optimizer step, counted by a callback.
"""

from __future__ import annotations

from typing import Any

from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options

from phalanx import AccumulationSchedule, Callback, Trainer, TrainModule, seed_everything


class SamplesPerStep(Callback):
    """Records the number of samples of each optimizer step."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.pending = 0
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pending += len(batch[0])
        if trainer.global_step > self.steps:
            self.samples.append(self.pending)
            self.steps, self.pending = trainer.global_step, 0


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    counter = SamplesPerStep()
    # From step 0 one micro-batch of 50 images, from step 10 two, from step 20 four.
    schedule = AccumulationSchedule({0: 1, 10: 2, 20: 4}, unit="step")
    trainer = Trainer(
        max_steps=25 if options.short else 100, accumulate_grad_batches=schedule, callbacks=[counter], **NO_FILES
    )
    trainer.fit(DigitClassifier(), *digit_loaders(batch_size=50))
    print(f"samples of each step: {counter.samples}")
    assert counter.samples[:25] == [50] * 10 + [100] * 10 + [200] * 5
    assert trainer.callback_metrics["val_accuracy"] > 0.5


if __name__ == "__main__":
    main()
