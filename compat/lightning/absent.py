"""Modules of Lightning that have no counterpart, and a sentence for each that says what to use instead."""

from __future__ import annotations

from typing import NoReturn

ABSENT = {
    "accelerators": 'name the device with accelerator="cpu" or "cuda" of Trainer and Fabric.',
    "demos": "keep 'from lightning.pytorch.demos import ...' for its data sets and plain modules, or copy them into "
    "the program; its LightningModules and LightningDataModules need their base class changed.",
    "loops": "there are no loop objects: read trainer.progress, or write your own loop with phalanx.Fabric.",
    "plugins": "name the precision with precision=...; ranks under SLURM, MPI and torchrun are found without "
    "a plug-in, and SyncBatchNorm is set with Trainer(sync_batchnorm=True).",
    "pytorch": "remove '.pytorch': phalanx.compat.lightning stands in for lightning and for lightning.pytorch.",
    "tuner": "compare short fits, Trainer(max_steps=...), with several batch sizes or learning rates.",
}


def refuse(module: str) -> NoReturn:
    """Raise the ``ImportError`` of a module that has no counterpart.

    Args:
        module: the ``__name__`` of the alias.
    """
    package, _, name = module.rpartition(".")
    raise ImportError(f"{package} has no {name}: {ABSENT[name]}", name=module)
