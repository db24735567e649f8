"""Stop on all ranks: a custom callback that decides by what one rank knows.

A rank that stopped alone would leave the others waiting. ``raise_trigger`` announces a decision of any rank, and it
appears in ``fired_triggers`` of all ranks after the same step. The check: a condition that holds on the last rank only
ends the fit on both, after the same step.
"""

from __future__ import annotations

from typing import Any

from tasks import NO_FILES, DigitClassifier, digit_loaders, recipe_options

from phalanx import Callback, Trainer, TrainModule, seed_everything


class StopWhenOneRankHasEnough(Callback):
    """Ends the fit when any rank has seen the digit 7 a number of times."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen = 0
        self.stopped_at: int | None = None

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The ranks read different samples; only the last one counts.
        if trainer.global_rank == trainer.world_size - 1:
            self.seen += int((batch[1] == 7).sum())
            if self.seen >= self.limit:
                trainer.raise_trigger("enough")
        if "enough" in trainer.fired_triggers and self.stopped_at is None:
            self.stopped_at = trainer.global_step
            trainer.request_stop("a rank has seen enough")


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    stop = StopWhenOneRankHasEnough(limit=10 if options.short else 100)
    trainer = Trainer(devices=2, strategy="ddp", max_epochs=20, callbacks=[stop], **NO_FILES)
    trainer.fit(DigitClassifier(), digit_loaders(batch_size=16)[0])

    steps = trainer.fabric.all_gather(stop.stopped_at).tolist()
    trainer.print(f"the ranks learned of it after steps {steps}, and ended after step {trainer.global_step}")
    assert stop.stopped_at is not None
    assert steps == [stop.stopped_at] * 2
    assert trainer.global_step < 20 * 47


if __name__ == "__main__":
    main()
