"""A recipe of preference tuning, which may be killed: ``recipe_run.py NAME STRATEGY RANKS ROOT [--lora] [--kill N]``.

It saves after every optimizer step, notes every metric in ``ROOT/run/version_0/metrics.csv``, and continues a run that
was killed. With ``--kill N`` rank 1 is killed once N optimizer steps are made.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import phalanx
from phalanx import Callback
from phalanx.callbacks import ModelCheckpoint
from phalanx.loggers import CSVLogger

COOKBOOK = Path(phalanx.__file__).parent / "examples" / "cookbook"
BATCHES = 4


class Kill(Callback):
    """Kills rank 1 after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def settings_of(root: str | Path) -> dict[str, Any]:
    """Return the arguments of the Trainer."""
    return {
        "accelerator": "cpu",
        "default_root_dir": root,
        "logger": CSVLogger(name="run"),
        "log_every_n_steps": 1,
        "limit_train_batches": BATCHES,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def prepared(name: str, options: Any, **settings: Any) -> tuple[Any, Any, list[Any]]:
    """Return the Trainer, the module and the loaders of a recipe, for ``BATCHES`` batches."""
    # For a moment: recipes have the names of other packages.
    sys.path.insert(0, str(COOKBOOK))
    recipe = importlib.import_module(name)
    sys.path.remove(str(COOKBOOK))
    given = {"batches": BATCHES} if name == "grpo" else {"max_epochs": 1}
    found: tuple[Any, Any, list[Any]] = recipe.prepare(options, **given, **settings)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("strategy")
    parser.add_argument("devices", type=int)
    parser.add_argument("root")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--kill", type=int)
    options = parser.parse_args()
    callbacks: list[Any] = [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)]
    callbacks += [Kill(options.kill)] if options.kill else []
    trainer, module, loaders = prepared(options.name, options, callbacks=callbacks, **settings_of(options.root))
    trainer.fit(module, loaders[0], ckpt_path="auto")


if __name__ == "__main__":
    main()
