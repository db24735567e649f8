"""A stage in forked ranks, for notebooks and interpreters: rank 0's results are copied back into this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..launch import launch_function
from ..launch.signals import ignore_interrupts
from ..parallel.meta_device import is_held
from .stages import run_stage

if TYPE_CHECKING:
    from ..api.train_module import TrainModule
    from ..launch.restart_policy import FitRecord
    from .session import Session, StageRequest


def run_in_function(session: Session, stage: str, request: StageRequest) -> Any:
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
        session.finish("interrupted")
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
            session.records.keep_loaders(name, loaders)
    module.use_trainer(session.view)


def _fits(module: TrainModule, weights: dict[str, Any]) -> bool:
    """Whether the weights have the shapes of the module's: a strategy may leave empty tensors in place of shards."""
    own = {name: value.shape for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return all(own[name] == value.shape for name, value in weights.items() if name in own)
