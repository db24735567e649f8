"""Lightning's Trainer, with the same settings as phalanx's."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import Any

from torch import nn

from .task import LOG_EVERY, Batches, Job, callback_class, module_class

L: Any = import_module("lightning.pytorch")
CSVLogger: Any = import_module("lightning.pytorch.loggers").CSVLogger

Task = module_class(L.LightningModule)

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def fit(job: Job) -> nn.Module:
    """Fit the task; return its trained net."""
    module = Task(job)
    L.Trainer(**settings(job)).fit(module, Batches(job.steps))
    net: nn.Module = module.net
    return net


def settings(job: Job) -> dict[str, Any]:
    """Return the arguments of the Trainer."""
    common: dict[str, Any] = {
        "max_epochs": job.epochs,
        "accelerator": "cpu",
        "devices": job.ranks,
        "strategy": "ddp" if job.ranks > 1 else "auto",
        "default_root_dir": str(job.directory),
    }
    if job.barebones:
        return common | {"barebones": True}
    callbacks = L.callbacks
    watching = [callback_class(L.Callback, job.overriding)() for _ in range(job.callbacks)]
    if job.everyday:
        kept = str(job.directory / "kept")
        watching += [
            callbacks.EarlyStopping(monitor="loss", patience=10**6, check_on_train_epoch_end=True),
            callbacks.ModelCheckpoint(dirpath=kept),
            callbacks.TQDMProgressBar(),
        ]
    return common | {
        "callbacks": watching,
        "logger": CSVLogger(save_dir=str(job.directory)) if job.everyday or job.values else False,
        "log_every_n_steps": LOG_EVERY,
        "enable_checkpointing": job.everyday,
        "enable_progress_bar": job.everyday,
        "enable_model_summary": False,
        "accumulate_grad_batches": job.accumulate,
    }
