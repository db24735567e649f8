"""``lightning.pytorch.trainer.states``: values of ``trainer.state``, to which phalanx's strings are equal."""

from __future__ import annotations

from enum import Enum

from ...framework.trainer.session import TrainerState as TrainerState

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]


class TrainerFn(str, Enum):
    """Values of ``trainer.state.fn``."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(str, Enum):
    """Values of ``trainer.state.stage``."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(str, Enum):
    """Values of ``trainer.state.status``."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
