"""``phalanx demo``: train the model of ``phalanx new lm``, made small, on the source of Python's standard library."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from .. import Trainer, seed_everything
from .new_project import TEMPLATES

_EPOCHS, _STEPS_PER_EPOCH = 5, 20


def run_demo(given: argparse.Namespace) -> int:
    """Train for a few seconds; return the exit code. The summary names the report and the command for the curves."""
    # As Python does for a script, so that it finds its own modules.
    sys.path.insert(0, str(TEMPLATES / "lm"))
    project = import_module("train")
    seed_everything(0)
    trainer = Trainer(
        strategy=given.strategy,
        devices=given.devices,
        max_epochs=_EPOCHS,
        limit_train_batches=_STEPS_PER_EPOCH,
        log_every_n_steps=10,
        default_root_dir=given.out,
        gradient_clip_val=1.0,
    )
    trainer.fit(project.LanguageModel(width=64, layers=1), datamodule=project.Source())
    return 0
