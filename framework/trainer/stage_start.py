"""``start_stage``: runs a stage of a Trainer in the ranks that it asks for, one stage at a time.

These ranks are the running ones, ranks that are started by running the script again, forked ranks in notebooks and
interpreters, or rank 0 alone in a script whose ranks were started for another Trainer with more devices.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.errors import ConfigurationError, RankError
from ..core.interception import current_interceptor
from ..core.package_paths import OWN_FOLDERS
from ..distributed.lone_rank import Handover, as_only_rank
from ..launch import launch_function
from ..launch.exit_hooks import install_rank_hooks
from ..launch.restart_policy import why_never_restarted
from ..launch.signals import ignore_interrupts
from ..parallel.meta_device import is_held
from .script_ranks import start_script_ranks
from .stages import run_stage

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..api.train_module import TrainModule
    from ..launch.restart_policy import FitRecord
    from ..system.launcher_env import Placement
    from .session import Session, StageRequest


def start_stage(session: Session, stage: str, request: StageRequest) -> Any:
    """Run a stage in this rank; start the ranks first if they are not running.

    Raises:
        ConfigurationError: a stage of the same Trainer, or of the same module, is in progress.
    """
    # `phalanx plan` runs a script up to here, takes the fit from the arguments, and ends the script.
    if (interceptor := current_interceptor()) is not None:
        return interceptor.stage(session, stage, request)
    with _only_stage(session, stage):
        request.module.check_free(f"Trainer.{stage}")
        resources, max_restarts = session.fabric.resources, session.settings.given.max_restarts
        place = resources.place
        if resources.launched is not None:
            return _run_alone(session, stage, request, resources.launched)
        start_script_ranks(session, session.writes)
        if max_restarts and (reason := why_never_restarted(place.launcher, max_restarts)):
            session.view.note(f"max_restarts={max_restarts} has no effect on this run, since {reason}.")
        run = _run_in_forked_ranks if resources.must_launch else run_stage
        return run(session, stage, request)


@contextmanager
def _only_stage(session: Session, stage: str) -> Generator[None, None, None]:
    """Context of a stage: it would take the place of another one, whose counters and saves would be lost."""
    if session.in_progress is not None:
        raise ConfigurationError(
            f"Trainer.{stage} was called while Trainer.{session.in_progress} of the same Trainer is running, and a "
            "Trainer runs one stage at a time: call it before or after. Validations during a fit are set with "
            "val_check_interval, and one before its first step with num_sanity_val_steps."
        )
    session.in_progress = stage
    try:
        yield
    finally:
        session.in_progress = None


# ---- rank 0 alone ----------------------------------------------------------------------------------------------------


def _run_alone(session: Session, stage: str, request: StageRequest, launched: Placement) -> Any:
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


# ---- forked ranks ----------------------------------------------------------------------------------------------------


def _run_in_forked_ranks(session: Session, stage: str, request: StageRequest) -> Any:
    """Run a stage in forked ranks; restore the weights, counters, metrics and callback states of rank 0 here.

    Attributes that hooks and steps set on the module or the DataModule stay in the ranks.

    Raises:
        KeyboardInterrupt: the stage was interrupted. What rank 0 had reached is restored all the same.
    """
    session.begin(stage, request)

    def adopt(fits: list[FitRecord]) -> None:
        # Known also if the ranks fail: the files that they wrote are there.
        for fit in fits:
            session.directory.adopt(fit.version, claimed=True, identity=fit.identity)

    try:
        resources = session.resources
        result, outcome = launch_function(
            _in_rank,
            (session, stage, request),
            resources.world_size,
            adopt,
            uses_cuda=resources.device_type == "cuda",
        )
    except BaseException:
        session.state = replace(session.state, status="interrupted")
        raise
    _restore(session, request, outcome)
    if outcome["interrupted"] is not None:
        raise KeyboardInterrupt(outcome["interrupted"] or f"{stage} was interrupted, and its ranks have ended.")
    return result


def _in_rank(session: Session, stage: str, request: StageRequest) -> tuple[Any, dict[str, Any]]:
    session.resources.update_placement()
    result, interrupted = None, None
    try:
        result = run_stage(session, stage, request)
    except KeyboardInterrupt as error:
        if session.resources.place.rank > 0:
            raise
        # The same interrupt may arrive again, from the terminal and from the process that forked this one.
        ignore_interrupts()
        interrupted = str(error)
    weights = _full_weights(request.module) if session.resources.place.rank == 0 else None
    return result, {**session.outcome(), "weights": weights, "interrupted": interrupted}


def _full_weights(module: TrainModule) -> dict[str, Any] | None:
    """Return the state of a module on the CPU; None if this rank does not hold all of it."""
    state = module.state_dict()
    if not all(is_held(value) for value in state.values() if isinstance(value, Tensor)):
        return None
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def _restore(session: Session, request: StageRequest, outcome: dict[str, Any]) -> None:
    """Restore the state that rank 0 has sent."""
    module = request.module
    # The ranks built these layers only in their copies of the module, and trained in this dtype.
    module.configure_model()
    undo = session.resources.precision.convert_module(module)
    if undo is not None:
        undo()
    session.take_outcome(outcome)
    if outcome["weights"] is None or not _fits(module, outcome["weights"]):
        session.note(
            "The module keeps the weights from before, since the ranks ended with sharded weights: load a checkpoint "
            "of the run, or let the strategy gather the weights."
        )
    else:
        module.drop_pretrained()
        module.load_state_dict(outcome["weights"])
    for name, loaders in request.given.items():
        if loaders is not None:
            session.records.loaders[name] = loaders
    module.use_trainer(session.view)


def _fits(module: TrainModule, weights: dict[str, Any]) -> bool:
    """Whether the weights have the shapes of the module's: a strategy may leave empty tensors in place of shards."""
    own = {name: value.shape for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return all(own[name] == value.shape for name, value in weights.items() if name in own)
