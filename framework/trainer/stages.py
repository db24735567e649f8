"""A stage of a Trainer's work (``fit``, ``validate``, ``test``, ``predict``) in one rank, from set-up to tear-down."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import StorageError
from ..diagnostics.collective_trace import comparing_collectives
from ..launch.exit_hooks import install_rank_hooks
from ..launch.signals import TRIGGER as LEAVE
from ..launch.signals import SignalWatch
from ..launch.slurm import TimeLimit
from ..loop.evaluation_loop import evaluate, predict
from ..loop.fit_loop import FitLoop
from ..state.module_state import encode_known
from ..system.environment import current_job, hiding_secrets, own_records
from ..system.redaction import without_secrets
from ..system.run_directory import REPORT
from ..watchdog.in_process_watchdog import watched
from .assembly import FitRequest, assemble_evaluation, assemble_fit
from .auto_strategy import settle_strategy
from .run_report import box, end_lines, report, start_lines
from .trainer_view import TrainerState

if TYPE_CHECKING:
    from .trainer import Trainer


def run_stage(trainer: Trainer, stage: str, request: FitRequest) -> Any:
    """Run a stage and return what it comes to: None for a fit, else a list with an item for each loader. Collective."""
    with running(trainer, stage, request):
        if stage == "fit":
            return _fit(trainer, request)
        run, plan = assemble_evaluation(trainer, request, stage)
        results: Any = predict(run, plan, request.keep_predictions) if stage == "predict" else evaluate(run, plan)
        run.loggers.finalize("success")
        return results


@contextmanager
def running(trainer: Trainer, stage: str, request: FitRequest) -> Generator[None, None, None]:
    """Hold a run: what is set up is taken down, whatever happens in between."""
    place = trainer.fabric.resources.place
    install_rank_hooks(place)
    own_records().clear_pending_error(place.rank)
    trainer.state = TrainerState(stage, "running")
    trainer.last_module, trainer.datamodule = request.module, request.datamodule
    if request.datamodule is not None:
        request.datamodule.trainer = trainer
    with watched(trainer.heartbeat, trainer.fabric.resources.place, trainer.stall_limits):
        try:
            yield
            trainer.heartbeat.enter("teardown")
            trainer.state.status = "finished"
            if trainer.run is not None:
                trainer.run.fabric.strategy.restore(trainer.run.module)
            _teardown(trainer, stage)
        except BaseException as error:
            trainer.heartbeat.enter("teardown")
            trainer.state.status = "interrupted"
            own_records().record_pending_error(place.rank, error, hiding_secrets())
            _fail(trainer, stage, error)
            raise
        finally:
            _let_go(trainer, request)


def _fit(trainer: Trainer, request: FitRequest) -> None:
    limit = TimeLimit(current_job(), trainer.time_limit_margin)
    with SignalWatch(trainer.preemption_signals) as watch, limit:
        settle_strategy(trainer, request)
        loop = assemble_fit(trainer, request)
        watch.tell(loop.run.triggers)
        if loop.run.world.is_global_zero:
            limit.tell(loop.run.triggers, LEAVE)
        _begin(trainer, loop)
        with ExitStack() as modes:
            if trainer.settings.detect_anomaly:
                modes.enter_context(torch.autograd.set_detect_anomaly(True))
            if trainer.settings.debug == "collectives":
                modes.enter_context(comparing_collectives(loop.run, loop.step))
            loop()
        loop.run.saver.end()
        _end(trainer, loop)


def _begin(trainer: Trainer, loop: FitLoop) -> None:
    """Tell loggers and the person how the fit is set up."""
    run = loop.run
    if hyperparameters := without_secrets(run.module.hparams_to_log):
        run.loggers.log_hyperparams(hyperparameters)
    if not run.world.is_global_zero:
        return
    run.loggers.log_graph(run.module)
    if trainer.writes:
        _keep(trainer, "config.json", trainer.configuration())
    _, unsaved = encode_known(dict(run.module.hparams))
    if unsaved and trainer.checkpoint_callback is not None:
        trainer.note(
            f"Checkpoints do not hold the hyperparameters {', '.join(unsaved)}, which are secrets by their names or of "
            "types that no file keeps: pass them to load_from_checkpoint, or leave them out with "
            "save_hyperparameters(ignore=...)."
        )
    if not trainer.settings.barebones:
        logs = trainer.run_dir if trainer.loggers else None
        saver = trainer.checkpoint_callback
        saves = (getattr(saver, "dirpath", None) or trainer.checkpoint_dir) if saver is not None else None
        trainer.note(box("phalanx", start_lines(run, loop.plan, loop.windows, logs, saves)))


def _end(trainer: Trainer, loop: FitLoop) -> None:
    """Close the loggers; tell the person what came of the fit and what to do next."""
    run = loop.run
    run.loggers.finalize("success")
    if not run.world.is_global_zero:
        return
    if trainer.writes:
        _keep(trainer, REPORT, report(run, trainer.callbacks))
    if not trainer.settings.barebones:
        trainer.note(box("done", end_lines(run, trainer.callbacks, trainer.log_dir, trainer.checkpoint_dir)))


def _keep(trainer: Trainer, name: str, document: Any) -> None:
    """Write a document into the run's directory; a run goes on without it."""
    try:
        trainer.directory.write_json(name, document)
    except StorageError as error:
        trainer.note(f"{name} is missing: {error}")


def _fail(trainer: Trainer, stage: str, error: BaseException) -> None:
    """Tell callbacks and loggers. No collective: other ranks may never come.

    What a callback raises here is told of, and takes the place of nothing: the error stays the run's.
    """
    run = trainer.run
    if run is None:
        return
    for callback in run.callbacks:
        if callback.wants("on_exception"):
            try:
                callback.on_exception(trainer, run.module, error)
            except Exception as another:
                trainer.note(f"{type(callback).__name__}.on_exception failed: {type(another).__name__}: {another}")
    if run.world.is_global_zero and trainer.writes and stage == "fit":
        told = hiding_secrets()(f"{type(error).__name__}: {error}")
        with suppress(Exception):
            trainer.directory.write_json(REPORT, report(run, trainer.callbacks) | {"stopped": told})
    run.loggers.finalize("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")


def _teardown(trainer: Trainer, stage: str) -> None:
    run = trainer.run
    if run is None:
        return
    if trainer.datamodule is not None:
        trainer.datamodule.teardown(stage)
    for callback in run.callbacks:
        if callback.wants("teardown"):
            callback.teardown(trainer, run.module, stage)
    run.module.teardown(stage)


def _let_go(trainer: Trainer, request: FitRequest) -> None:
    run = trainer.run
    if run is not None:
        trainer.last_progress = run.progress
        trainer.last_metrics = {kind: run.metric_view(kind) for kind in trainer.last_metrics}
        run.saver.close()
        run.fabric.strategy.teardown()
        if run.restore_layers is not None:
            run.restore_layers()
        run.world.close()
    request.module.untoggle_optimizer()
    request.module.log_to(None)
    request.module.__dict__["_run"] = None
    trainer.directory.release()
    trainer.run = trainer.loop = None
