"""``phalanx.configuration``: configuration files for programs, beside ``phalanx.TrainerCLI``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.configuration.optimizers import (
        LRSchedulerCallable as LRSchedulerCallable,
        OptimizerCallable as OptimizerCallable,
        ReduceLROnPlateau as ReduceLROnPlateau,
        instantiate_class as instantiate_class,
    )
    from .framework.configuration.parser import TrainerArgumentParser as TrainerArgumentParser
    from .framework.configuration.save_config import SaveConfigCallback as SaveConfigCallback
    from .framework.configuration.trainer_cli import TrainerCLI as TrainerCLI

_HOMES = {
    ".framework.configuration.optimizers": "LRSchedulerCallable OptimizerCallable ReduceLROnPlateau instantiate_class",
    ".framework.configuration.parser": "TrainerArgumentParser",
    ".framework.configuration.save_config": "SaveConfigCallback",
    ".framework.configuration.trainer_cli": "TrainerCLI",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
