"""Runs started from a notebook or an interpreter: ranks are forked, and rank 0's results are copied back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..launch import launch_function
from .stages import run_stage

if TYPE_CHECKING:
    from .session import Session, StageRequest


def run_in_function(session: Session, stage: str, request: StageRequest) -> Any:
    """Run a stage in forked ranks; restore the weights, counters, metrics and callback states of rank 0 here.

    Attributes that hooks and steps set on the module or the DataModule stay in the ranks.
    """
    resources = session.resources
    session.begin(stage, request)
    result, outcome = launch_function(_in_rank, (session, stage, request), resources.world_size)
    # The ranks built these layers only in their copies of the module, and trained in this dtype.
    request.module.configure_model()
    resources.precision.convert_module(request.module)
    request.module.load_state_dict(outcome.pop("weights"))
    session.take_outcome(outcome)
    return result


def _in_rank(session: Session, stage: str, request: StageRequest) -> tuple[Any, dict[str, Any]]:
    session.resources.update_placement()
    result = run_stage(session, stage, request)
    weights = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in request.module.state_dict().items()
    }
    return result, {**session.outcome(), "weights": weights}
