"""``start_stage``: a stage of a Trainer, in ranks that are running or are started first; one at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigurationError
from ..core.interception import current_interceptor
from .forked_stage import run_in_function
from .lone_stage import run_alone
from .script_ranks import start_script_ranks
from .stages import run_stage

if TYPE_CHECKING:
    from collections.abc import Generator

    from .session import Session, StageRequest


def start_stage(session: Session, stage: str, request: StageRequest) -> Any:
    """Run a stage in this rank; start the ranks first if they are not running.

    Raises:
        ConfigurationError: a stage of the same Trainer, or of the same module, is in progress.
    """
    if (interceptor := current_interceptor()) is not None:
        return interceptor.stage(session, stage, request)
    with _only_stage(session, stage):
        request.module.check_free(f"Trainer.{stage}")
        resources, max_restarts = session.fabric.resources, session.settings.given.max_restarts
        place = resources.place
        if resources.launched is not None:
            return run_alone(session, stage, request, resources.launched)
        start_script_ranks(session, session.writes)
        if max_restarts and place.launcher != "phalanx":
            started = "there is no script to run again" if place.launcher is None else f"{place.launcher} started it"
            session.view.note(f"max_restarts={max_restarts} has no effect on this run, since {started}.")
        run = run_in_function if resources.must_launch else run_stage
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
    session.enter(stage)
    try:
        yield
    finally:
        session.enter(None)
