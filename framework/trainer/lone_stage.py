"""A stage of a Trainer with one device, in a script whose ranks were started for a Trainer with more."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import RankError
from ..core.package_paths import OWN_FOLDERS
from ..distributed.lone_rank import Handover, as_only_rank
from ..fabric.fabric import Fabric
from ..launch.exit_hooks import install_rank_hooks
from ..parallel.resources import resolve_resources
from .stages import run_stage

if TYPE_CHECKING:
    from ..system.launcher_env import Placement
    from .session import Session, StageRequest


class TrainerFabric(Fabric):
    """The Fabric of a Trainer: with one device, rank 0 of several may use it alone."""

    _resolve = staticmethod(partial(resolve_resources, may_be_alone=True))


def run_alone(session: Session, stage: str, request: StageRequest, launched: Placement) -> Any:
    """Run a stage on rank 0; the other ranks wait for its results, counters, metrics and callback states.

    The weights of their modules stay as they are: the next stage on all ranks starts from those of rank 0.

    Raises:
        RankError: on the other ranks; rank 0 failed, or ended without this call.
    """
    install_rank_hooks(launched)
    handover = Handover(launched, f"Trainer.{stage}", _call_stack())
    if launched.rank > 0:
        session.begin(stage, request)
        result, outcome = handover.take()
        session.take_outcome(outcome)
        return result
    try:
        with as_only_rank():
            result = run_stage(session, stage, request)
    except BaseException as error:
        handover.give(RankError(f"rank 0 failed in Trainer.{stage}: {type(error).__name__}: {error}"))
        raise
    handover.give((result, session.outcome()))
    return result


def _call_stack() -> list[str]:
    """Return the files and lines of the user's code that led to the call of the Trainer, the call itself first."""
    stack: list[str] = []
    frame: Any = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*OWN_FOLDERS, "<frozen")):
            stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return stack
