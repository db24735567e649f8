"""Construction of the loop of a fit: data, accumulation windows, limits and intervals."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..checkpoint.snapshot_slots import AUTO, COPIES
from ..core.data_spans import from_json
from ..core.errors import CheckpointError, ConfigurationError
from ..core.intervals import Interval
from ..data.accumulation_window import GlobalWindows, RepeatableWindows, Windows
from ..launch.rescue import keep_target
from ..loop import ManualStep
from ..loop.automatic_step import AutomaticStep
from ..loop.evaluation_loop import EvaluationPlan
from ..loop.fit_loop import FitLoop
from ..loop.fit_plan import FitPlan
from ..loop.joint_step import JointStep
from ..loop.recovering_step import RecoveringStep, can_repeat, check_recovery
from ..memory.available_memory import disk_free, host_memory
from ..parallel.strategy import Routed
from ..resume.preempted_save import RESCUED, own_path
from ..resume.snapshots import NoSnapshots, Snapshots
from ..run.overrides import is_overridden
from .script_ranks import finds_by_restarts
from .settings import REWIND
from .stage_records import rank_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..checkpoint.reader import Checkpoint
    from ..core.global_batch import GlobalBatch
    from ..data.evaluation_source import EvaluationSource
    from ..resume.checkpoint_search import Origin
    from ..run.run import Run
    from .data_sources import Data
    from .resolved_settings import Settings
    from .session import Session


def build_loop(session: Session, run: Run, data: Data) -> FitLoop:
    """Build the loop of a fit, at the start of an epoch. Collective."""
    settings = session.settings

    def sources() -> tuple[Any, int | None]:
        source = data.training(settings)
        source.announce_by(session.note)
        return source, settings.limit_batches("train", data.agreed_length(source, None))

    source, full = sources()
    windows = _windows(settings.global_batch)(source, run.accumulation, run.progress, full, run.world.size)
    validation = None
    # Where validation is switched off its loaders are not requested, since their data may be missing.
    is_on = settings.limits["validate"] != 0
    if is_on and is_overridden("validation_step", run.module):
        found = data.evaluation("validate", sequential=bool(settings.overfit_batches))
        validation = evaluation_plan(session, "validate", found)
        if validation is not None:
            validation.seen = run.evaluated_batches
        elif not data.provides("validate"):
            session.note(
                f"{type(run.module).__name__} has a validation_step, but there is no validation loader, so this fit "
                "does not validate: give val_dataloaders, or limit_val_batches=0 to say that none is meant."
            )
    elif is_on and data.provides("validate") and run.module.validation_step is not None:
        session.note(
            f"There is a validation loader, but {type(run.module).__name__} has no validation_step, so this fit does "
            "not validate: define validation_step, or leave the loader out."
        )
    plan = _fit_plan(settings, validation, full)
    loop = FitLoop(run, plan, windows, time.monotonic)
    if settings.given.reload_dataloaders_every_n_epochs:
        every = settings.given.reload_dataloaders_every_n_epochs
        loop.reload_data(every, lambda: loop.windows.use_source(*sources()), _validation_reloader(session, loop, data))
    return loop


def restore_position(
    session: Session, loop: FitLoop, data: Data, checkpoint: Checkpoint | None, origin: Origin
) -> None:
    """Set where a fit begins in its data, what it leaves out of them, and its first size of micro-batches. Collective.

    The counters of the checkpoint were restored before, since the user's code that makes loaders may read them.

    Args:
        session: the state of the Trainer.
        loop: the loop of the fit.
        data: its data.
        checkpoint: the checkpoint that the fit resumes from; None for the start of the data.
        origin: where the fit begins.
    """
    windows = loop.windows
    windows.exclude(origin.excluded_spans)
    document = {} if checkpoint is None else checkpoint.document
    windows.exclude(from_json(document.get("left_out", ())))
    if isinstance(windows, RepeatableWindows):
        largest = origin.largest_micro_batch
        first = document.get("micro_batch_size") or session.first_micro_batch or windows.micro_batch_size
        windows.start_with(first if largest is None else min(first, largest))
    position = _position(checkpoint)
    if position is not None:
        source = windows.source
        windows.resume(position, session.settings.limit_batches("train", data.agreed_length(source, position)))
        # The checkpoint counts batches of the number of ranks that saved it.
        loop.run.progress.batch_in_epoch = source.batches_before(position)


def _windows(global_batch: GlobalBatch | None) -> type[Windows]:
    if global_batch is None:
        return Windows
    return RepeatableWindows if global_batch.is_found else GlobalWindows


def _validation_reloader(session: Session, loop: FitLoop, data: Data) -> Callable[[], None]:
    def reload() -> None:
        validation = loop.plan.validation
        if validation is not None:
            found = data.evaluation("validate", sequential=bool(session.settings.overfit_batches))
            fresh = evaluation_plan(session, "validate", found)
            if fresh is not None:
                validation.sources, validation.limits = fresh.sources, fresh.limits

    return reload


def _position(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Return the position within an epoch of a checkpoint; None at the start of an epoch."""
    if checkpoint is None:
        return None
    progress = checkpoint.document["progress"]
    if progress["batch_in_epoch"] == 0 or progress["epoch_ended"]:
        return None
    position: dict[str, Any] | None = checkpoint.document["position"]
    return position


def evaluation_plan(session: Session, stage: str, sources: list[EvaluationSource]) -> Any:
    """Return the plan of an evaluation over these sources; None for a fit without validation data."""
    settings = session.settings
    if stage == "validate" and session.state.fn == "fit" and (not sources or settings.limits["validate"] == 0):
        return None
    limits = [settings.limit_batches(stage, source.len_batches()) for source in sources]
    plan = EvaluationPlan(stage, sources, limits, None, session.settings.given.inference_mode)
    session.records.batches[stage] = rank_batches(plan)
    return plan


def _fit_plan(settings: Settings, validation: EvaluationPlan | None, batches: int | None) -> FitPlan:
    sanity = settings.num_sanity_val_steps
    plan = FitPlan(
        max_epochs=settings.max_epochs,
        min_epochs=settings.min_epochs,
        max_steps=settings.max_steps,
        min_steps=settings.min_steps,
        log_every_n_steps=settings.log_every_n_steps,
        validation=validation,
        check_val_every_n_epoch=settings.check_val_every_n_epoch,
        sanity_batches=None if sanity == -1 else sanity,
        max_units=settings.max_units,
    )
    interval = settings.val_check_interval
    if validation is None:
        return plan
    if isinstance(interval, timedelta):
        plan.validate_every_seconds = interval.total_seconds()
        plan.validate_at_epoch_end = False
    elif isinstance(interval, Interval):
        plan.validate_every, plan.validate_at_epoch_end = interval, False
    elif isinstance(interval, int):
        if settings.check_val_every_n_epoch is not None and batches is not None and interval > batches:
            raise ConfigurationError(
                f"val_check_interval={interval} is more than the {batches} batches of an epoch: give a smaller one, or "
                "check_val_every_n_epoch=None to count batches over epochs."
            )
        plan.validate_every_batches, plan.validate_at_epoch_end = interval, False
    elif interval < 1.0:
        if batches is None:
            raise ConfigurationError(
                f"val_check_interval={interval} is a fraction, but the training loader has no length: give a number."
            )
        plan.validate_every_batches, plan.validate_at_epoch_end = max(1, int(batches * interval)), False
    return plan


def check_limits(loop: FitLoop, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that was saved beyond ``max_epochs`` or ``max_steps``, before anything is restored from it.

    Raises:
        CheckpointError: on all ranks.
    """
    plan, progress = loop.plan, loop.run.progress
    for name, limit, reached, what in (
        ("max_epochs", plan.max_epochs, progress.epoch + progress.epoch_ended, "epochs"),
        ("max_steps", plan.max_steps, progress.global_step, "optimizer steps"),
    ):
        if limit is not None and 0 <= limit < reached:
            raise CheckpointError(
                f"{checkpoint.path} was saved after {reached} {what}, but {name}={limit}: raise {name} to "
                "continue training."
            )


def routed_code(run: Run, windows: Windows, restarts: bool) -> Routed:
    """Return the code inside the functions that the strategy routes in a fit.

    Args:
        run: the fit.
        windows: its windows.
        restarts: whether ranks are started again with smaller micro-batches when one of them runs out of memory.

    Raises:
        ConfigurationError: windows are to be repeated when a rank runs out of memory, and cannot be.
    """
    if isinstance(windows, RepeatableWindows):
        if can_repeat(run):
            return Routed.REPEATED
        if not restarts:
            check_recovery(run)
    return Routed.LOSS if run.module.automatic_optimization else Routed.STEP


def build_step(
    run: Run, windows: Windows, settings: Settings, transfer: Callable[[Any], Any] | None
) -> AutomaticStep | ManualStep:
    """Return the step that the loop calls for each window; ``transfer`` moves a batch to the device."""
    nonfinite, clipping = settings.given.nonfinite, settings.clipping
    # The fit goes back after the error.
    nonfinite = "raise" if nonfinite == REWIND else nonfinite
    if not run.module.automatic_optimization:
        return ManualStep(run, transfer, nonfinite)
    if isinstance(windows, RepeatableWindows) and can_repeat(run):
        return RecoveringStep(run, transfer, nonfinite, clipping, windows)
    if run.strategy.window_passes is not None:
        return JointStep(run, transfer, nonfinite, clipping, run.strategy.window_passes)
    return AutomaticStep(run, transfer, nonfinite, clipping, windows)


def snapshots_of(session: Session, run: Run, origin: Origin) -> Snapshots | NoSnapshots:
    """Return what takes the snapshots of a fit: nothing without a launcher that has memory for them. Collective."""
    nodes, given = origin.memory, session.settings.given.snapshots
    if nodes is None and given:
        run.note(
            f"snapshots={given!r} has no effect on this run: they are for scripts whose ranks phalanx itself starts, "
            "and need /dev/shm on each node."
        )
    if nodes is None or given is False:
        return NoSnapshots()
    if given is None and not (nodes.serves_restarts or finds_by_restarts(session.settings, session.fabric.resources)):
        return NoSnapshots()
    folder, needed = nodes.folder, COPIES * run.saver.estimate(weights_only=False)
    if nodes.leads:
        # A rewind has removed it.
        folder.mkdir(exist_ok=True)
    if run.world.is_global_zero and (saves := run.context.preemption_directory()) is not None:
        keep_target(folder, own_path(saves, RESCUED, run.directory.identity))
    # Restarted ranks find all parts on their own node.
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if (found := min(run.world.all_gather_object(held + min(disk_free(folder), host_memory(1))))) < needed:
        run.note(
            f"No snapshots are taken, and restarts begin from checkpoints: they need {needed:,} bytes of memory on "
            f"each node, and {found:,} are free in {folder.parent.parent}."
        )
        return NoSnapshots()
    return Snapshots(run, nodes, given or AUTO, origin.checkpoint if origin.is_snapshot else None)
