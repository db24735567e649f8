"""Runs started from a notebook or an interpreter: ranks are forked, and what they came to is brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..distributed.world import placement
from ..launch.fork_launcher import launch_function
from .assembly import FitRequest
from .stages import run_stage

if TYPE_CHECKING:
    from .trainer import Trainer


def run_in_function(trainer: Trainer, stage: str, request: FitRequest) -> Any:
    """Run a stage in forked ranks; put weights, counters, metrics and callback states of rank 0 back here.

    What hooks and steps set on the module or the DataModule stays in the ranks.
    """
    resources = trainer.fabric.resources
    trainer.last_module, trainer.datamodule = request.module, request.datamodule
    result, outcome = launch_function(_in_rank, (trainer, stage, request), resources.world_size)
    # The ranks have built this in their copies; and trained in this dtype.
    request.module.configure_model()
    resources.precision.convert_module(request.module)
    request.module.load_state_dict(outcome["weights"])
    trainer.state, trainer.last_progress, trainer.last_metrics = outcome["trainer"]
    trainer.directory.version, trainer.directory.claimed = outcome["directory"]
    for logger in trainer.loggers:
        logger.attach(trainer.directory.root, trainer.directory.name, trainer.directory.version)
    for callback in trainer.callbacks:
        if (state := outcome["callbacks"].get(callback.state_key)) is not None:
            callback.load_state_dict(state)
    return result


def _in_rank(trainer: Trainer, stage: str, request: FitRequest) -> tuple[Any, dict[str, Any]]:
    trainer.fabric.resources.place = placement()
    result = run_stage(trainer, stage, request)
    outcome = {
        "weights": {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in request.module.state_dict().items()
        },
        "trainer": (trainer.state, trainer.last_progress, trainer.last_metrics),
        "directory": (trainer.directory.version, trainer.directory.claimed),
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
    }
    return result, outcome
