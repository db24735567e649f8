"""``lightning.pytorch.utilities.types``: types for the annotations of steps, loaders and optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]

STEP_OUTPUT: TypeAlias = Tensor | Mapping[str, Any] | None
TRAIN_DATALOADERS: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any
_EVALUATE_OUTPUT: TypeAlias = list[Mapping[str, float]]
_PREDICT_OUTPUT: TypeAlias = list[Any] | list[list[Any]]
_PATH: TypeAlias = str | os.PathLike[str]
_DEVICE: TypeAlias = torch.device | str | int
_MAP_LOCATION_TYPE: TypeAlias = _DEVICE | Callable[[Any, str], Any] | dict[str, str] | None
LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]


class LRSchedulerConfigType(TypedDict, total=False):
    """A scheduler, when it steps, and what it monitors."""

    scheduler: LRSchedulerTypeUnion
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """An optimizer without a scheduler."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict, total=False):
    """An optimizer and its scheduler."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: str


OptimizerLRScheduler: TypeAlias = (
    Optimizer
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[Optimizer]
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfigType]]
    | None
)
