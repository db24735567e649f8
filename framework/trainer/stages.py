"""A stage of a Trainer's work (``fit``, ``validate``, ``test``, ``predict``) in one rank, from set-up to tear-down."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import NonFiniteError, Preempted, StorageError, add_hint
from ..diagnostics import comparing_collectives
from ..distributed.control import Signal
from ..launch.exit_hooks import install_rank_hooks
from ..launch.restart_policy import FINAL
from ..launch.run_notifications import fit_notifier
from ..launch.signals import SignalWatch
from ..launch.slurm import TimeLimit
from ..launch.spot_notice import SpotNotices
from ..loop import evaluate, predict, profiled
from ..metrics.hparams_text import hyperparameters_to_log
from ..metrics.no_log import OUTSIDE_LOOPS
from ..parallel.compilation import uncompiled
from ..parallel.elsewhere import guard_absent, unguard
from ..parallel.strategy_checks import remark_on_windows
from ..report import add_to_report, finish_report, how_to_resume
from ..resume import go_back
from ..resume.checkpoint_search import Origin, shared_directories
from ..state import encode_known
from ..storage.mirror import FAILED_SECONDS, PREEMPTED_SECONDS, NoMirror, release_lease
from ..system.console import terminal_columns
from ..system.environment import current_job, hiding_secrets, own_records
from ..system.failure_records import brief_traceback, exit_code_of
from ..system.run_directory import CONFIG, REPORT
from ..watchdog import watched

# Imported when they are called, as a Trainer that has not run a stage needs none of them: see __init__.py.
from . import (
    assemble_evaluation,
    assemble_fit,
    box,
    choose_micro_batch,
    choose_strategy,
    configuration,
    end_lines,
    next_lines,
    outcome,
    start_lines,
)
from .checks import check_ranks
from .hints import add_hints
from .run_record import start_recording
from .script_ranks import note_exhausted
from .settings import REWIND

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ..loop.fit_loop import FitLoop
    from ..run.run import Run
    from .session import Session, StageRequest


def run_stage(session: Session, stage: str, request: StageRequest) -> Any:
    """Run a stage; return None for a fit, else a list with the results of each loader. Collective."""
    if stage == "fit":
        again = None
        while True:
            with running(session, stage, request):
                again = _fit(session, request, again)
            if again is None:
                return None
    with running(session, stage, request):
        check_ranks(session, stage, request)
        run, plan = assemble_evaluation(session, request, stage)
        results: Any = predict(run, plan, request.keep_predictions) if stage == "predict" else evaluate(run, plan)
        run.loggers.finalize("success")
        if stage != "predict" and session.directory.claimed and run.world.is_global_zero:
            try:
                add_to_report(session.directory.path, stage, results)
            except StorageError as error:
                session.note(f"{REPORT} lacks the results of {stage}: {error}")
        return results


@contextmanager
def running(session: Session, stage: str, request: StageRequest) -> Generator[None, None, None]:
    """Context of a run that tears down on exit, also after an error."""
    place = session.fabric.resources.place
    install_rank_hooks(place)
    own_records().clear_pending_error(place.rank)
    session.begin(stage, request)
    unguard(request.module)
    with watched(session.heartbeat, place, session.settings.stall_limits, session.end_stalled):
        try:
            yield
            session.heartbeat.enter("teardown")
            session.state = replace(session.state, status="finished")
            if session.run is not None:
                session.run.restore_module()
                guard_absent(session.run.module)
            _teardown(session, stage)
        except BaseException as error:
            session.heartbeat.enter("teardown")
            session.state = replace(session.state, status="interrupted")
            note_exhausted(session, error)
            add_hints(error, stage, session.run, place.launcher is None)
            own_records().record_pending_error(place.rank, error, hiding_secrets())
            _fail(session, stage, error, is_alone=place.launcher is None)
            raise
        finally:
            _release(session, request)


def _fit(session: Session, request: StageRequest, again: Origin | None) -> Origin | None:
    """Fit; return None, or the origin of the fit that continues the run after a non-finite loss."""
    limit = TimeLimit(current_job(), session.settings.time_limit_margin)
    notices = SpotNotices(session.settings.preemption_notices)
    with SignalWatch(session.settings.preemption_signals) as watch, limit, notices:
        check_ranks(session, "fit", request)
        choose_strategy(session, request)
        choose_micro_batch(session, request)
        loop = assemble_fit(session, request, again)
        if loop.run.world.is_global_zero and (addresses := session.settings.notify):
            session.notifier = fit_notifier(addresses, session.run_directory, session.note)
        watch.report_to(loop.run.triggers)
        if loop.run.world.is_global_zero:
            limit.report_to(loop.run.triggers, Signal.PREEMPT)
        if loop.run.world.local_rank == 0:
            notices.report_to(loop.run.triggers, Signal.PREEMPT)
        _begin(session, loop)
        with ExitStack() as modes:
            if session.settings.given.detect_anomaly:
                modes.enter_context(torch.autograd.set_detect_anomaly(True))
            if session.settings.given.debug == "collectives":
                modes.enter_context(comparing_collectives(loop.run, loop.step))
            if session.settings.profiler.measures:
                modes.enter_context(_profiling(session, loop))
            try:
                loop()
            except NonFiniteError as error:
                if session.settings.given.nonfinite != REWIND:
                    raise
                return _go_back(session, loop, error)
        loop.run.saver.end()
        loop.snapshots.end()
        _end(session, loop)
        return None


@contextmanager
def _profiling(session: Session, loop: FitLoop) -> Generator[None, None, None]:
    """Measure a fit within the context; show the summary of rank 0 at its end, also after an error."""
    profiler, world = session.settings.profiler, loop.run.world
    profiler.begin(session.directory.path / "profile" if session.writes else None, world.rank)
    try:
        with profiled(loop, profiler):
            yield
    finally:
        try:
            profiler.end()
        except OSError as error:
            session.note(f"The profile of rank {world.rank} was not written: {error}")
        summary = profiler.summary()
        if summary and world.is_global_zero:
            session.note(f"Profile of the fit, rank 0 of {world.size}:\n{summary}")


def _go_back(session: Session, loop: FitLoop, error: NonFiniteError) -> Origin:
    """Return the origin of the fit that continues from an earlier checkpoint. Collective.

    Raises:
        NonFiniteError: there is no such checkpoint.
    """
    run = loop.run
    run.saver.finish()
    folders = [session.directory.checkpoints, *shared_directories(session.callbacks)]
    checkpoint = go_back(run, loop.windows, folders, error, loop.epochs_are_alike)
    if checkpoint is None:
        raise error
    # Those of the steps that are left out.
    loop.snapshots.end()
    run.loggers.finalize("interrupted")
    assert session.origin is not None
    return replace(session.origin, checkpoint=checkpoint)


def _begin(session: Session, loop: FitLoop) -> None:
    """Send the configuration of the fit to the loggers and the console."""
    run = loop.run
    autolog = session.settings.given.enable_autolog_hparams
    if session.loggers and autolog and (hyperparameters := hyperparameters_to_log(run.module, session.datamodule)):
        run.loggers.log_hyperparams(hyperparameters)
    if not run.world.is_global_zero:
        return
    if not run.traits.forward_has_collectives:
        # The module may log in its forward pass.
        log = run.module.log_to(None)
        with uncompiled(run.module):
            run.loggers.log_graph(run.module)
        run.module.log_to(log)
    elif run.loggers.records_graph:
        session.note(
            f"The module's graph is not recorded: under strategy={run.strategy.name!r} a forward pass takes all ranks, "
            "and only rank 0 traces the module. Record it in a run with strategy='ddp' or on one device."
        )
    settings = session.settings
    size = run.world.data_size
    if remark := remark_on_windows(run.strategy, settings.accumulation, settings.global_batch, size):
        session.note(remark)
    if session.writes:
        document = configuration(session, loop)
        try:
            session.directory.write_json(CONFIG, document)
        except StorageError as error:
            session.note(f"{CONFIG} is missing: {error}")
        session.record_with(start_recording(session, loop))
    _, unknown = encode_known(dict(run.module.hparams))
    at_default = run.module.hparams_at_default
    if (unsaved := [name for name in unknown if name not in at_default]) and session.checkpoint_callback is not None:
        session.note(
            f"Checkpoints do not hold the hyperparameters {', '.join(unsaved)}, which are secrets by their names or of "
            "types that no file keeps: pass them to load_from_checkpoint, or leave them out with "
            "save_hyperparameters(ignore=...)."
        )
    if session.settings.verbose:
        logs = _log_directory(session) or (str(session.directory.path) if session.loggers else None)
        saves = session.checkpoint_directory() if session.checkpoint_callback is not None else None
        session.view.note(box("phalanx", start_lines(loop, logs, saves), terminal_columns()))


def _end(session: Session, loop: FitLoop) -> None:
    """Close the loggers; print the outcome of the fit and the next steps."""
    run = loop.run
    run.loggers.finalize("success")
    if not run.world.is_global_zero:
        return
    _report(session, run, 0, {})
    if session.settings.verbose:
        framed = box("done", end_lines(run, session.callbacks), terminal_columns())
        following = next_lines(run, session.callbacks, _log_directory(session), session.directory)
        session.view.note(session.settings.without_addresses("\n".join([framed, *following])))


def _report(session: Session, run: Run, exit_code: int, error: dict[str, Any]) -> str | None:
    """Write the report of a fit that has ended, notify the user's servers, and return how to resume it.

    A failure is reported and the run continues.
    """
    directory, advice = session.run_directory, None
    if directory is None and session.notifier is None:
        return None
    end = outcome(session, run, exit_code) | error
    if session.recorder is not None:
        session.recorder.close(exit_code, end["stopped"])
    if directory is not None:
        try:
            advice = how_to_resume(finish_report(directory, end))
        except StorageError as failure:
            session.view.note(f"{REPORT} is missing: {failure}")
    session.notify_end(end)
    return advice


def _fail(session: Session, stage: str, error: BaseException, is_alone: bool) -> None:
    """Report an error to callbacks and loggers. No collective: other ranks may never reach it.

    An exception of a hook is printed and does not replace the error of the run. If no launcher reports how to resume
    the run, the error does.
    """
    run = session.run
    if run is None:
        return
    run.module.log_to(OUTSIDE_LOOPS)
    hooks: list[tuple[Any, Callable[[], None]]] = [
        (callback, partial(callback.on_exception, session.view, run.module, error))
        for callback in run.callbacks
        if callback.wants("on_exception")
    ]
    if session.datamodule is not None:
        hooks.append((session.datamodule, partial(session.datamodule.on_exception, error)))
    for owner, hook in hooks:
        try:
            hook()
        except Exception as another:
            session.note(f"{type(owner).__name__}.on_exception failed: {type(another).__name__}: {another}")
    if run.world.is_global_zero and stage == "fit":
        hide = hiding_secrets()
        message = {"stopped": hide(f"{type(error).__name__}: {error}"), "traceback": hide(brief_traceback(error))}
        with suppress(Exception):
            advice = _report(session, run, exit_code_of(error), message)
            # A run that was asked to end has said it.
            if advice and is_alone and exit_code_of(error) not in FINAL:
                add_hint(error, f"{advice[0].upper()}{advice[1:]}")
    run.loggers.finalize("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    # A run that was asked to end has been given the time to save.
    mirror, session.mirror = session.mirror, NoMirror()
    try:
        mirror.close(PREEMPTED_SECONDS if isinstance(error, Preempted) else FAILED_SECONDS)
    except StorageError as failure:
        session.note(str(failure))


def _teardown(session: Session, stage: str) -> None:
    run = session.run
    if run is None:
        return
    if session.datamodule is not None:
        session.datamodule.teardown(stage)
    for callback in run.callbacks:
        if callback.wants("teardown"):
            callback.teardown(session.view, run.module, stage)
    run.module.teardown(stage)


def _release(session: Session, request: StageRequest) -> None:
    """Release all resources of the stage, also after an error. No collective."""
    run = session.run
    if session.recorder is not None:
        session.recorder.close(1, None)
    if run is not None:
        session.keep_results()
        run.saver.close()
        run.strategy.teardown()
        # The Fabric outlives the run, and this callback would keep the run with it.
        run.updater.guard(False, None)
        run.at_end.close()
        run.world.close()
        for callback in run.callbacks:
            callback.log_through(None)
    if session.notifier is not None:
        session.notifier.close()
    request.module.detach()
    mirror, session.mirror = session.mirror, NoMirror()
    try:
        mirror.close()
    finally:
        release_lease(session.directory.path)
        session.directory.release()
        session.forget_run()


def _log_directory(session: Session) -> str | None:
    return next((directory for logger in session.loggers if (directory := logger.log_dir)), None)
