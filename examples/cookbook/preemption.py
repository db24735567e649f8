"""Preemption: a run that a signal stops continues with the same command.

On SIGTERM, which job queues send, a fit finishes its step, saves and ends with exit code 75. ``ckpt_path="auto"`` finds
that checkpoint. Here a callback sends the signal to its own process, and the exception is caught instead of ending the
script. The check: the resumed fit ends with the weights of one that was not stopped, bit for bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tasks import DigitClassifier, digit_loaders, recipe_options, same_weights

from phalanx import Callback, Trainer, TrainModule, seed_everything
from phalanx.errors import Preempted
from phalanx.loggers import CSVLogger


class SendSignal(Callback):
    """Sends SIGTERM to this process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(out: Path, *callbacks: Callback) -> tuple[DigitClassifier, Trainer]:
    """Start a run, or continue it; return the module and the Trainer."""
    seed_everything(1)
    module = DigitClassifier()
    trainer = Trainer(
        max_epochs=3, default_root_dir=out, logger=CSVLogger(name="digits"), callbacks=list(callbacks), verbose=False
    )
    trainer.fit(module, *digit_loaders(), ckpt_path="auto")
    return module, trainer


def main() -> None:
    options = recipe_options(__doc__)
    out = Path(options.out) / "preemption"
    undisturbed, _ = fit(out / "undisturbed")
    try:
        fit(out / "preempted", SendSignal(step=30))
    except Preempted as error:
        print(f"exit code {error.exit_code}: {error}")
    else:
        raise AssertionError("the signal did not stop the run")
    resumed, trainer = fit(out / "preempted")
    print(f"equal after resuming: {same_weights(resumed, undisturbed)}; report: {trainer.run_dir / 'report.html'}")
    assert same_weights(resumed, undisturbed)
    assert trainer.global_step == 72


if __name__ == "__main__":
    main()
