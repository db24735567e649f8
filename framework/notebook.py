"""Runs started from a notebook or an interpreter: ranks are forked, and what they came to is brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .assembly import FitRequest
from .launch import launch_function
from .world import placement

if TYPE_CHECKING:
    from .trainer import Trainer


def run_in_function(trainer: Trainer, stage: str, request: FitRequest) -> Any:
    """Run an entry point in forked ranks; put weights, counters, metrics and callback states of rank 0 back here."""
    resources = trainer.fabric.resources
    result, outcome = launch_function(_in_rank, (trainer, stage, request), resources.world_size)
    request.module.load_state_dict(outcome["weights"])
    trainer.adopt(request.module, outcome)
    return result


def _in_rank(trainer: Trainer, stage: str, request: FitRequest) -> tuple[Any, dict[str, Any]]:
    trainer.fabric.resources.place = placement()
    result = trainer.run_stage(stage, request)
    weights = {name: tensor.cpu() for name, tensor in request.module.state_dict().items()}
    return result, {"weights": weights, **trainer.outcome()}
