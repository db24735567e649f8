"""The run whose ranks ``recovery_trials.py`` kills: ``recovery_run.py ROOT STRATEGY RANKS SNAPSHOTS``.

STRATEGY may have degrees, as in ``"fsdp tp=2"``. The ranks are restarted from snapshots in memory. Rank 0 writes the
step and the time at the start of each batch to ``ROOT/steps``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from kill_run import train

from phalanx import Callback
from phalanx.callbacks import ModelCheckpoint

STEPS = "steps"


class Recorder(Callback):
    """Records when each batch begins, and makes a step take as long as it does with a model of some size."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step} {time.monotonic()}\n")
        time.sleep(0.01)


def main() -> None:
    """Train, with a checkpoint at the end of each epoch and snapshots in memory."""
    root, strategy, ranks, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    train(
        root,
        strategy,
        ranks,
        samples=240,
        enable_report=False,
        verbose=False,
        val_check_interval=19,
        callbacks=[ModelCheckpoint(monitor="val", save_top_k=2, save_last=True), Recorder(root / STEPS)],
        max_restarts=100,
        snapshots=every if every == "auto" else int(every),
    )


if __name__ == "__main__":
    main()
