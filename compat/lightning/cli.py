"""``lightning.pytorch.cli``: configuration files and command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ...framework.configuration.optimizers import (
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    instantiate_class,
)
from ...framework.configuration.parser import Namespace, TrainerArgumentParser as LightningArgumentParser
from ...framework.configuration.save_config import SaveConfigCallback
from ...framework.configuration.trainer_cli import TrainerCLI

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
]

ArgsType = Sequence[str] | Mapping[str, Any] | Namespace | None
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


class LightningCLI(TrainerCLI):
    """``TrainerCLI`` whose environment variables have the names that Lightning gives them."""

    env_prefix = "PL"
