"""From a Trainer's settings and what the user handed over to a run that is ready to loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..api.callback import Callback
from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..checkpoint.reader import Checkpoint
from ..core.errors import CheckpointError, ConfigurationError
from ..core.optimizer_config import resolve_optimizers
from ..core.position_rng import mix_seed, seed_generators
from ..data.accumulation_window import Windows
from ..data.evaluation_source import EvaluationSource
from ..distributed.collective_errors import open_everywhere
from ..distributed.rank_zero_first import first_in_turn
from ..loop.automatic_step import AutomaticStep
from ..loop.batch_norm_statistics import statistics_pass
from ..loop.evaluation_loop import EvaluationPlan
from ..loop.fit_loop import FitLoop, FitPlan
from ..loop.manual_step import ManualStep
from ..metrics.logger_threads import LoggerFanout
from ..parallel.sync_batch_norm import share_batch_statistics
from ..resume.checkpoint_saver import Saver
from ..resume.rank_state import restore_rank
from ..resume.restore import Resumption, agree_on_resumption, load_model, regroup, restore_run
from ..resume.resume_point import Origin, claim_directory, find_checkpoint, on_rank_zero
from ..run.batch_transfer import batch_transfer
from ..run.overrides import check_closure, is_overridden
from ..run.run import Run
from .data_sources import Data, require_data
from .plugins import check_state_keys
from .settings import Settings

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass
class FitRequest:
    """What an entry point of the Trainer was handed."""

    module: TrainModule
    given: dict[str, Any]
    datamodule: DataModule | None = None
    ckpt_path: str | Path | None = None
    keep_predictions: bool = True


def assemble_fit(trainer: Trainer, request: FitRequest) -> FitLoop:
    """Build the loop of a fit, restored from a checkpoint where one is asked for. Collective."""
    settings, module = trainer.settings, request.module
    run = _begin(trainer, request, "fit")
    origin = claim_directory(
        trainer.directory, request.ckpt_path, trainer.callbacks, run.world, trainer.note, trainer.writes
    )
    checkpoint = None
    if origin.checkpoint is not None:
        checkpoint = open_everywhere(run.world, origin.checkpoint, origin.verified)
    trainer.seed = _agreed_seed(run, checkpoint)
    for logger in trainer.loggers:
        logger.attach(trainer.directory.root, trainer.directory.name, trainer.directory.version)
    _prepare(run, request, "fit")
    run.accumulation = trainer.accumulation
    data = Data(run.world, module, request.datamodule, request.given, trainer.seed, trainer.use_distributed_sampler)
    loop = _loop(trainer, run, data, request, checkpoint)
    trainer.attach_loop(loop)
    _place_model(trainer, run)
    _configure_optimizers(run, settings)
    resumption = None
    if checkpoint is not None:
        resumption = agree_on_resumption(run, checkpoint)
        regroup(run, resumption)
    run.heartbeat.mark_sync_point()
    run.optimizers = run.fabric.strategy.setup(module, run.optimizers, training=True)
    transfer = batch_transfer(run.fabric, module, request.datamodule)
    train_transfer = None if transfer is None else partial(_transfer_first, transfer)
    if loop.plan.validation is not None:
        loop.plan.validation.transfer = transfer
    run.averages.recompute = statistics_pass(run, data, transfer, loop.windows.full)
    if module.automatic_optimization:
        loop.step = AutomaticStep(run, train_transfer, settings.nonfinite, settings.clipping, loop.windows)
    else:
        loop.step = ManualStep(run, train_transfer, settings.nonfinite)
    if resumption is not None:
        _restore(loop, resumption, origin)
    elif run.world.data_rank > 0:
        # Ranks draw different numbers from here on (dropout); rank 0 stays where one process would be.
        seed_generators(mix_seed(trainer.seed, run.world.data_rank))
    return loop


def assemble_evaluation(trainer: Trainer, request: FitRequest, stage: str) -> tuple[Run, EvaluationPlan]:
    """Build what ``validate``, ``test`` or ``predict`` runs. Collective."""
    run = _begin(trainer, request, stage)
    trainer.seed = _agreed_seed(run, None)
    if trainer.loggers and not trainer.directory.claimed:
        claim_directory(trainer.directory, None, trainer.callbacks, run.world, trainer.note, trainer.writes)
    for logger in trainer.loggers:
        logger.attach(trainer.directory.root, trainer.directory.name, trainer.directory.version)
    _prepare(run, request, stage)
    data = Data(
        run.world, request.module, request.datamodule, request.given, trainer.seed, trainer.use_distributed_sampler
    )
    sources = data.evaluation(stage)
    require_data(sources, stage)
    _place_model(trainer, run)
    run.fabric.strategy.setup(request.module, [], training=False)
    if request.ckpt_path is not None:
        found = on_rank_zero(
            run.world,
            lambda: find_checkpoint(
                request.ckpt_path or "", trainer.directory.root, trainer.directory.name, trainer.callbacks, trainer.note
            ),
        )
        checkpoint = open_everywhere(run.world, found)
        load_model(run, checkpoint)
    plan = _evaluation_plan(trainer, stage, sources)
    plan.transfer = batch_transfer(run.fabric, request.module, request.datamodule)
    return run, plan


# ---- the parts -----------------------------------------------------------------------------------


def _begin(trainer: Trainer, request: FitRequest, stage: str) -> Run:
    """Make the run and bind module and Trainer to it."""
    world = trainer.fabric.world
    brought = request.module.configure_callbacks()
    callbacks = _with_brought(trainer.callbacks, [brought] if isinstance(brought, Callback) else list(brought))
    trainer.callbacks = callbacks
    fanout = LoggerFanout(trainer.loggers if world.is_global_zero else [], trainer.note)
    run = Run(trainer, trainer.fabric, request.module, callbacks, fanout, stage)
    run.saver = Saver(run)
    request.module.__dict__["_run"] = run
    request.module.log_to(run.train_log)
    trainer.attach_run(run)
    run.heartbeat.mark_sync_point()
    return run


def _with_brought(callbacks: Sequence[Callback], brought: list[Callback]) -> list[Callback]:
    """Return the Trainer's callbacks, those of the same class replaced by what the module brings along."""
    kinds = {type(callback) for callback in brought}
    merged = [callback for callback in callbacks if type(callback) not in kinds] + brought
    check_state_keys(merged)
    return merged


def _prepare(run: Run, request: FitRequest, stage: str) -> None:
    """Run the hooks that get data ready, and ``setup``. Collective."""
    module, datamodule = run.module, request.datamodule
    # However long it takes: a download computes nothing, and the others wait for it.
    with run.heartbeat.section("outside"), first_in_turn(run.world, local=True):
        if run.world.local_rank == 0:
            if datamodule is not None:
                datamodule.prepare_data()
            module.prepare_data()
    if datamodule is not None:
        datamodule.setup(stage)
    for callback in run.callbacks:
        callback.setup(run.trainer, module, stage)
    module.setup(stage)
    run.heartbeat.mark_sync_point()


def _agreed_seed(run: Run, checkpoint: Checkpoint | None) -> int:
    """Return the seed that data order derives from: a checkpoint's, or what rank 0's generator was seeded with."""
    if checkpoint is not None and "seed" in checkpoint.document:
        return int(checkpoint.document["seed"])
    return run.world.broadcast_object(torch.initial_seed())


def _place_model(trainer: Trainer, run: Run) -> None:
    """Build what the module left for ``configure_model``, and put it on its device in its dtype."""
    module, precision = run.module, run.fabric.precision
    with run.fabric.strategy.building():
        module.configure_model()
    if trainer.sync_batchnorm and run.world.size > 1:
        run.restore_layers = share_batch_statistics(module, run.world.device.type)
    run.fabric.strategy.place(module)
    precision.convert_module(module)


def _configure_optimizers(run: Run, settings: Settings) -> None:
    run.optimizers, run.schedulers = resolve_optimizers(run.module.configure_optimizers(), run.module)
    strategy = run.fabric.strategy
    if len(run.optimizers) > 1 and not strategy.traits.supports_several_optimizers:
        raise ConfigurationError(
            f"configure_optimizers returned {len(run.optimizers)} optimizers, but strategy={strategy.name!r} takes "
            "one: return one with several parameter groups, or use strategy='fsdp', which takes several."
        )
    automatic = run.module.automatic_optimization
    strategy.routes_losses, strategy.routes_backward = automatic, not automatic
    if not run.module.automatic_optimization:
        if run.accumulation.constant != 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={run.accumulation} with automatic_optimization = False: call the optimizer's "
                "step in training_step when enough gradients have gathered, and leave it out of the Trainer."
            )
        return
    if len(run.optimizers) != 1:
        found = "none" if not run.optimizers else str(len(run.optimizers))
        raise ConfigurationError(
            f"configure_optimizers returned {found} where automatic optimization steps exactly one optimizer. "
            "Return one, or set automatic_optimization = False and step them in training_step."
        )
    check_closure(run.optimizers[0])


def _loop(trainer: Trainer, run: Run, data: Data, request: FitRequest, checkpoint: Checkpoint | None) -> FitLoop:
    settings = trainer.settings
    position = _position(checkpoint)
    if checkpoint is not None:
        run.progress.load_state_dict(checkpoint.document["progress"])

    def sources() -> tuple[Any, int | None]:
        source = data.training(settings)
        source.announce_by(trainer.note)
        return source, settings.limit_batches("train", data.agreed_length(source, None))

    source, full = sources()
    windows = Windows(source, run.accumulation, run.progress, full, run.world.size)
    validation = None
    if is_overridden("validation_step", run.module):
        validation = _evaluation_plan(trainer, "validate", data.evaluation("validate"))
        if validation is not None:
            validation.seen = run.evaluated_batches
    elif request.given.get("validate") is not None:
        raise ConfigurationError(f"val_dataloaders was given, but {type(run.module).__name__} has no validation_step.")
    plan = _fit_plan(settings, validation, full)
    loop = FitLoop(run, plan, windows, time.monotonic)
    if position is not None:
        windows.resume(position, settings.limit_batches("train", data.agreed_length(source, position)))
    if settings.reload_every:
        loop.reload_every = settings.reload_every
        loop.reload = _reloader(trainer, loop, data, sources)
    return loop


def _reloader(trainer: Trainer, loop: FitLoop, data: Data, sources: Callable[[], Any]) -> Callable[[], None]:
    def reload() -> None:
        source, full = sources()
        loop.windows.source, loop.windows.full = source, full
        validation = loop.plan.validation
        if validation is not None:
            fresh = _evaluation_plan(trainer, "validate", data.evaluation("validate"))
            if fresh is not None:
                validation.sources, validation.limits = fresh.sources, fresh.limits

    return reload


def _position(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Return where in an epoch a checkpoint stands; None at the start of one."""
    if checkpoint is None:
        return None
    progress = checkpoint.document["progress"]
    if progress["batch_in_epoch"] == 0 or progress["epoch_ended"]:
        return None
    position: dict[str, Any] | None = checkpoint.document["position"]
    return position


def _evaluation_plan(trainer: Trainer, stage: str, sources: list[EvaluationSource]) -> Any:
    settings = trainer.settings
    if stage == "validate" and trainer.state.stage == "fit" and (not sources or settings.limits["validate"] == 0):
        return None
    limits = [settings.limit_batches(stage, source.len_batches()) for source in sources]
    return EvaluationPlan(stage, sources, limits, None, trainer.inference_mode)


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
    )
    interval = settings.val_check_interval
    if isinstance(interval, timedelta):
        plan.validate_every_seconds = interval.total_seconds()
        plan.validate_at_epoch_end = False
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


def _tell_of_other_data(run: Run, then: str | None, now: str | None) -> None:
    if None not in (then, now) and then != now:
        run.trainer.note(
            f"The checkpoint was saved within an epoch of {then}; the data has {now} now. The epoch goes on at the "
            "same place, so that samples may be seen twice in it, or not at all."
        )


def _restore(loop: FitLoop, resumption: Resumption, origin: Origin) -> None:
    """Put the run back to where a checkpoint stands. Collective."""
    run, source, checkpoint = loop.run, loop.windows.source, resumption.checkpoint
    restore_run(run, resumption)
    progress = run.progress
    if loop.windows.resumed_at is not None:
        progress.batch_in_epoch = source.batches_before(loop.windows.resumed_at)
        _tell_of_other_data(run, checkpoint.document.get("data"), source.described())
    if origin.continues:
        run.loggers.resume(progress.global_step, checkpoint.document.get("loggers", []))
    restore_rank(run, checkpoint, loop.windows)
    run.resumed = checkpoint.path, progress.global_batch
    plan, done = loop.plan, progress.epoch + progress.epoch_ended
    for name, limit, stands, what in (
        ("max_epochs", plan.max_epochs, done, "epochs"),
        ("max_steps", plan.max_steps, progress.global_step, "optimizer steps"),
    ):
        if limit is not None and 0 <= limit < stands:
            raise CheckpointError(
                f"{checkpoint.path} stands after {stands} {what}, but {name}={limit}: raise {name} to train on."
            )


def _transfer_first(transfer: Callable[[Any, int], Any], batch: Any) -> Any:
    return transfer(batch, 0)
