"""``phalanx demo``: train the classifier of ``phalanx new classifier`` on real data."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from .. import Trainer, seed_everything
from ..callbacks import ModelCheckpoint
from ..framework.core.errors import ConfigurationError
from .new_project import TEMPLATES, install_command

_EPOCHS = 10


def run_demo(given: argparse.Namespace) -> int:
    """Train for a few seconds; the summary at the end names the report and the command for the curves."""
    folder = TEMPLATES / "classifier"
    if install := install_command(folder, ["train.py"]):
        raise ConfigurationError(f"The demo trains on scikit-learn's digits, which is not installed: {install}.")
    # A project's script finds its own modules in the same way.
    sys.path.insert(0, str(folder))
    project = import_module("train")
    seed_everything(0)
    trainer = Trainer(
        strategy=given.strategy,
        devices=given.devices,
        max_epochs=_EPOCHS,
        log_every_n_steps=10,
        default_root_dir=given.out,
        callbacks=ModelCheckpoint(monitor="val/accuracy", mode="max"),
    )
    trainer.fit(project.Classifier(), datamodule=project.Digits())
    return 0
