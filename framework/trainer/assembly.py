"""Assembly of a run from a Trainer's settings, the module and the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..api.callback import save_while_training
from ..checkpoint.node_folders import NodeFolders
from ..checkpoint.reader import open_on_all_ranks
from ..core.errors import ConfigurationError
from ..core.optimizer_config import resolve_optimizers
from ..core.position_rng import mix_seed
from ..distributed.collective_errors import on_all_ranks, on_rank_zero
from ..distributed.seed import seed_rank
from ..distributed.world import World
from ..loop import statistics_pass
from ..metrics.logger_fanout import LoggerFanout
from ..metrics.no_log import OUTSIDE_LOOPS
from ..metrics.torchmetrics_state import gather_by
from ..parallel.compilation import is_compiled, is_compiled_by_user
from ..parallel.generation import route_generation
from ..parallel.strategy import Routed
from ..parallel.strategy_checks import check_placed
from ..parallel.supplied import SuppliedValues
from ..parallel.sync_batch_norm import share_batch_statistics
from ..pretrained import plan_loading
from ..pretrained.request import initialize_rest
from ..pretrained.transformers_models import empty_tensors
from ..profiling.flop_count import FlopCount
from ..resume import agree_on_resumption, load_model, restore_groups_and_freezing, restore_run
from ..resume.checkpoint_saver import Saver
from ..resume.checkpoint_search import Origin, mirrored_folders
from ..resume.restore import restore_rank
from ..resume.resume_point import claim_again, claim_directory, find_checkpoint
from ..resume.resumed_data import restore_data_module, warn_of_other_batch, warn_of_other_data
from ..run.overrides import batch_transfer, check_closure, is_overridden
from ..run.run import Run
from ..state.switched_weights import SwitchedWeights
from ..storage.cached_url import local_place, portable, url_of
from ..storage.mirror import open_mirror
from ..system.atomic_files import hidden_sibling
from .checks import check_backward
from .data_sources import Data, prepare_data, require_data
from .hints import device_hints
from .loop_assembly import (
    build_loop,
    build_step,
    check_limits,
    evaluation_plan,
    restore_position,
    routed_code,
    snapshots_of,
)
from .plugins import merged_callbacks
from .script_ranks import restarts_exhausted
from .settings import REWIND

if TYPE_CHECKING:
    from ..api.callback import Callback
    from ..checkpoint.reader import Checkpoint
    from ..loop.evaluation_loop import EvaluationPlan
    from ..loop.fit_loop import FitLoop
    from ..pretrained.loading import LoadPlan
    from ..resume.restore import Resumption
    from .resolved_settings import Settings
    from .session import Session, StageRequest


def assemble_fit(session: Session, request: StageRequest, again: Origin | None = None) -> FitLoop:
    """Build the loop of a fit, restored from a checkpoint if one is requested. Collective.

    The order of a resumed fit:

        choose the checkpoint and verify it (``claim_directory``); the seed; prepare_data and setup; the state of the
            data module
        counters (``Progress``); the position in the data for this number of ranks, the data that are left out, the
            size of micro-batches (``restore_position``)
        configure_model, device, configure_optimizers
        compare the checkpoint with module and optimizers on all ranks (``agree_on_resumption``); no weight was loaded
            so far, so that a module stays as it was if they do not match
        parameter groups and frozen parameters; Strategy.setup
        weights, extra state of modules, optimizers, averages, schedulers, scaler, callbacks, the metrics that were
            shown last (``restore_run``); on_load_checkpoint, which may read and change all of them
        loggers (``_restore``); metrics of the epoch so far, numbers of evaluated batches; the states of loaders and of
            random generators are held (``restore_rank``)
        in the loop: the data are opened at the position (``Windows.begin``), and after the hooks that the epoch
            repeats the random generators are set (``RepeatedSection.restore_generators``)

    Args:
        session: the state of the Trainer.
        request: the arguments of ``fit``.
        again: the start of a fit that continues the one before; None to choose it by the arguments.

    Raises:
        CheckpointError: on all ranks; the checkpoint is missing or damaged, does not match, or is beyond the limits.
        ConfigurationError: on all ranks; the module, its optimizers or the settings contradict one another.
    """
    settings, module = session.settings, request.module
    run = _begin(session, request, "fit")
    saves = save_while_training(session.callbacks) or settings.fast_dev_run
    if settings.given.nonfinite == REWIND and not saves:
        raise ConfigurationError(
            "nonfinite='rewind' goes back to a checkpoint, and this Trainer saves none: leave enable_checkpointing on, "
            "or add a ModelCheckpoint."
        )
    if again is None:
        resume_point = claim_directory(
            session.directory, request.ckpt_path, session.callbacks, run.world, session.note, session.writes
        )
    else:
        resume_point = claim_again(session.directory, again, run.world)
    session.origin = resume_point
    session.records.keep_checkpoint(resume_point.checkpoint, named=not resume_point.continues)
    checkpoint = None
    if resume_point.checkpoint is not None:
        checkpoint = open_on_all_ranks(run.world, resume_point.checkpoint, resume_point.verified)
    if session.writes:
        _begin_uploading(session, run.world)
    session.use_seed(_agreed_seed(run, checkpoint))
    session.attach_loggers()
    _prepare(run, request, "fit")
    restore_data_module(run, checkpoint)
    run.accumulation = session.accumulation
    data = _data(session, run, request)
    if checkpoint is not None:
        run.progress.load_state_dict(checkpoint.document["progress"])
    loop = build_loop(session, run, data)
    session.loop = loop
    restore_position(session, loop, data, checkpoint, resume_point)
    run.saver.follow(loop.windows)
    pretrained = _place_model(session, run, request, training=True, checkpoint=checkpoint)
    _configure_optimizers(run)
    # An engine that takes one optimizer steps a form of its own.
    own_step = [] if run.traits.takes_one_optimizer else run.optimizers
    for hint in device_hints(run.world.device, run.precision.compute_dtype == torch.float32, own_step):
        session.note(hint)
    resumption = None
    if checkpoint is not None:
        resumption = agree_on_resumption(run, checkpoint)
        check_limits(loop, checkpoint)
        restore_groups_and_freezing(run, resumption)
    run.heartbeat.mark_sync_point()
    _distribute(run, pretrained, training=True, routed=routed_code(run, loop.windows, restarts_exhausted(session)))
    run.saver.keep_base()
    transfer = batch_transfer(run.world.device, run.precision, module, request.datamodule, run.strategy.part)
    _attach_step(run, loop, data, settings, transfer)
    if resumption is not None:
        _restore(loop, resumption, resume_point)
    elif (own := run.world.identical_group) > 0:
        # Ranks draw different numbers from now on (dropout); rank 0 draws those of a single process.
        seed_rank(mix_seed(session.seed, own), run.world.device)
    loop.snapshots = snapshots_of(session, run, resume_point)
    return loop


def _begin_uploading(session: Session, world: World) -> None:
    """Begin to upload what a run has in a bucket, on the first rank of each node. Collective."""
    folders = mirrored_folders(session.directory, session.callbacks)
    if not any(map(url_of, folders)):
        return
    nodes = NodeFolders(world, session.directory.path, has_copies=False)
    if nodes.are_several:
        _refuse_common_cache(world, nodes, session.directory.path)

    def begin() -> None:
        if nodes.leads:
            session.mirror = open_mirror(folders, session.note, world.is_global_zero)

    on_all_ranks(world, begin)


def _refuse_common_cache(world: World, nodes: NodeFolders, folder: Path) -> None:
    """Raise a ``ConfigurationError`` if several nodes write into one directory of the cache. Collective."""
    mark = hidden_sibling(folder / "mark", "tmp")

    def leave_mark() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        return mark.name

    name = on_rank_zero(world, leave_mark)

    def check() -> None:
        if nodes.leads and not world.is_global_zero and (folder / name).exists():
            raise ConfigurationError(
                f"{str(folder)!r}, the cache of a bucket, is on a disk that several nodes share: set PHALANX_CACHE to "
                "a directory on a local disk of each node."
            )

    try:
        on_all_ranks(world, check)
    finally:
        if world.is_global_zero:
            mark.unlink(missing_ok=True)


def assemble_evaluation(session: Session, request: StageRequest, stage: str) -> tuple[Run, EvaluationPlan]:
    """Build the run and the plan of ``validate``, ``test`` or ``predict``. Collective."""
    run = _begin(session, request, stage)
    session.use_seed(_agreed_seed(run, None))
    if session.loggers and not session.directory.claimed:
        claim_directory(session.directory, None, session.callbacks, run.world, session.note, session.writes)
    if session.loggers:
        _begin_uploading(session, run.world)
    session.attach_loggers()
    _prepare(run, request, stage)
    checkpoint = _evaluated_checkpoint(session, run, request)
    restore_data_module(run, checkpoint)
    data = _data(session, run, request)
    sources = data.evaluation(stage)
    require_data(sources, stage)
    pretrained = _place_model(session, run, request, training=False, checkpoint=checkpoint)
    _distribute(run, pretrained, training=False, routed=Routed.FORWARD)
    if checkpoint is not None:
        load_model(run, checkpoint)
        session.records.weights_replaced(request.module, checkpoint.path)
        session.records.keep_checkpoint(checkpoint.path)
    plan = evaluation_plan(session, stage, sources)
    session.evaluation = plan
    precision = run.precision
    plan.transfer = batch_transfer(run.world.device, precision, request.module, request.datamodule, run.strategy.part)
    return run, plan


def _evaluated_checkpoint(session: Session, run: Run, request: StageRequest) -> Checkpoint | None:
    """Return the verified checkpoint that an evaluation was given; None for the module's own weights. Collective."""
    if request.ckpt_path is None:
        return None
    directory, has_fitted = session.directory, session.records.has_fitted

    def find() -> tuple[str, bool]:
        given = request.ckpt_path or ""
        one = find_checkpoint(given, directory.root, directory.name, session.callbacks, session.note, has_fitted)
        return portable(one.path), one.verified

    found, verified = on_rank_zero(run.world, find)
    return open_on_all_ranks(run.world, local_place(found), verified)


# ---- stages of the assembly -----------------------------------------------------------------------------------------


def _begin(session: Session, request: StageRequest, stage: str) -> Run:
    """Create the run and attach module and Trainer to it. Collective: the first one joins the process group."""
    world = session.fabric.world
    configured = request.module.configure_callbacks()
    module_callbacks = cast("list[Callback]", list(configured) if isinstance(configured, Sequence) else [configured])
    callbacks = merged_callbacks(session.callbacks, module_callbacks)
    session.use_callbacks(callbacks)
    fanout = LoggerFanout(session.loggers if world.is_global_zero else [], session.note)
    run = Run(session.context(), session.fabric, request.module, callbacks, fanout, stage, Saver)
    request.module.attach(run)
    request.module.log_to(OUTSIDE_LOOPS)
    for callback in callbacks:
        callback.log_through(request.module)
    session.attach_run(run)
    run.heartbeat.mark_sync_point()
    return run


def _prepare(run: Run, request: StageRequest, stage: str) -> None:
    """Run ``prepare_data`` and ``setup``. Collective."""
    module, datamodule = run.module, request.datamodule
    # The section "outside" has no stall limit: the first rank of a node may download for hours while the
    # others wait.
    with run.heartbeat.section("outside"):
        for owner in (datamodule, module):
            if owner is not None:
                prepare_data(owner, run.world)
    if datamodule is not None:
        datamodule.setup(stage)
    for callback in run.callbacks:
        callback.setup(run.trainer, module, stage)
    module.setup(stage)
    run.heartbeat.mark_sync_point()


def _agreed_seed(run: Run, checkpoint: Checkpoint | None) -> int:
    """Return the seed of the data order: that of the checkpoint, or the seed of rank 0's generator. Collective."""
    if checkpoint is not None and "seed" in checkpoint.document:
        return int(checkpoint.document["seed"])
    return run.world.broadcast_object(torch.initial_seed())


def _data(session: Session, run: Run, request: StageRequest) -> Data:
    shards, kept = session.settings.shards_data, session.records.loaders
    return Data(run.world, request, session.seed, shards, kept)


def _place_model(
    session: Session, run: Run, request: StageRequest, training: bool, checkpoint: Checkpoint | None
) -> LoadPlan | None:
    """Call ``configure_model``, move the module to its device and dtype, and compile its parts. Collective.

    In a fit, blocks keep activations as the Trainer's ``memory`` says.

    Args:
        session: the Trainer's session.
        run: the run.
        request: the arguments of the stage.
        training: whether the stage is a fit.
        checkpoint: the checkpoint whose weights are loaded later. They replace any pretrained ones, unless it leaves
            out frozen weights.

    Returns:
        The pretrained weights to load after ``Strategy.setup``; None if there are none.

    Raises:
        ConfigurationError: on all ranks; the module has parts that this strategy cannot train or shard.
        CheckpointError: on all ranks; the pretrained weights cannot be read, or do not match the module.
    """
    module, precision = run.module, run.precision
    replaced = checkpoint is not None and not checkpoint.left_out
    with nullcontext() if replaced else SuppliedValues(), run.strategy.building():
        module.configure_model()
        if not replaced:
            module.settle_pretrained()
        empty = empty_tensors(module)
    check_placed(run.strategy, module, training)
    pretrained = _planned(run, request, empty, replaced)
    if session.settings.given.sync_batchnorm and run.world.size > 1:
        run.at_end.callback(share_batch_statistics(module, run.device_type))
    run.strategy.to_device(module, () if pretrained is None else pretrained.supplied)
    undo = precision.convert_module(module)
    if undo is not None:
        run.at_end.callback(undo)
    compilation = session.compilation or session.fabric.compilation
    if compilation is not None:
        run.at_end.callback(compilation.apply(module, run.strategy))
        if is_compiled(module):
            run.at_end.callback(module.log_outside_graphs())
    memory = session.settings.memory
    if memory is not None and training:
        run.at_end.callback(memory.apply(module))
    return pretrained


def _planned(run: Run, request: StageRequest, empty: set[int], replaced: bool) -> LoadPlan | None:
    module, strategy = run.module, run.strategy
    if replaced:
        with strategy.building():
            module.drop_pretrained(empty)
        return None
    requests = module.take_pretrained(request.pretrained)
    if not requests:
        return None
    plan: LoadPlan = plan_loading(strategy, run.world, module, requests)
    with strategy.building():
        initialize_rest(module, empty, plan.supplied)
    return plan


def _load_pretrained(run: Run, plan: LoadPlan | None) -> None:
    """Read this rank's part of the pretrained weights into a module that is set up. Collective.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if plan is None:
        return
    plan.load(run.strategy, run.module)
    run.module.use_sources(plan.sources)
    for note in plan.notes:
        run.note(note)


def _attach_step(
    run: Run, loop: FitLoop, data: Data, settings: Settings, transfer: Callable[[Any, int], Any] | None
) -> None:
    """Build the step that the loop calls for each window, and the pass for batch norm statistics of averages."""
    # The pass reads batches of the loader, and this number counts global batches.
    full = loop.windows.full if settings.global_batch is None else None
    statistics = statistics_pass(
        run, partial(data.loaders, "train"), lambda: data.evaluation("train")[0], transfer, full
    )
    run.averages.recompute = statistics
    run.averages.use_switched(SwitchedWeights(run.module, run.strategy, run.optimizers))
    train_transfer = None if transfer is None else partial(_transfer_first, transfer)
    # Checked before the ranks start too, but strategy="auto" has been replaced since then.
    check_backward(run.module, run.strategy)
    run.meter.use_peak(settings.given.device_peak_flops, run.precision.compute_dtype)
    visible = not any(is_compiled_by_user(part) for part in run.module.modules())
    if not settings.barebones and visible:
        run.meter.flop_count = FlopCount()
    step = build_step(run, loop.windows, settings, train_transfer)
    loop.use_step(step, transfer, settings.verify_every, has_samples=settings.global_batch is not None)


def _distribute(run: Run, pretrained: LoadPlan | None, training: bool, routed: Routed) -> None:
    """Set the module and its optimizers up under the strategy, and load pretrained weights. Collective."""
    run.use_optimizers(run.strategy.setup(run.module, run.optimizers, training, routed), run.schedulers)
    _load_pretrained(run, pretrained)
    run.at_end.callback(route_generation(run.module, run.strategy, run.fabric.forward_context()))
    run.at_end.callback(gather_by(run.module, run.world))


def _configure_optimizers(run: Run) -> None:
    """Call ``configure_optimizers``.

    Raises:
        ConfigurationError: the number of optimizers, or accumulation, does not fit the strategy or the kind of
            optimization.
    """
    module = run.module
    steps_itself = not module.automatic_optimization or is_overridden("lr_scheduler_step", module)
    returned = module.configure_optimizers()
    run.use_optimizers(
        *resolve_optimizers(returned, module, steps_itself, lambda: run.trainer.estimated_stepping_batches)
    )
    strategy = run.strategy
    if len(run.optimizers) > 1 and strategy.traits.takes_one_optimizer:
        raise ConfigurationError(
            f"configure_optimizers returned {len(run.optimizers)} optimizers, but strategy={strategy.name!r} takes "
            "one: return one with several parameter groups, or use strategy='fsdp', which takes several."
        )
    if not run.module.automatic_optimization:
        if run.accumulation.constant != 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={run.accumulation} with automatic_optimization = False: call the optimizer's "
                "step in training_step when enough gradients have accumulated, and leave it out of the Trainer."
            )
        return
    if len(run.optimizers) != 1:
        found = "no optimizer" if not run.optimizers else f"{len(run.optimizers)} optimizers"
        then = "run the steps without updates" if not run.optimizers else "step them in training_step"
        raise ConfigurationError(
            f"configure_optimizers returned {found}, but automatic optimization steps exactly one: return one, or set "
            f"automatic_optimization = False to {then}."
        )
    check_closure(run.optimizers[0])


def _restore(loop: FitLoop, resumption: Resumption, resume_point: Origin) -> None:
    """Restore the run, and the state of this rank, from a checkpoint that matches. Collective."""
    run, source, checkpoint = loop.run, loop.windows.source, resumption.checkpoint
    restore_run(run, resumption)
    if loop.windows.resumed_at is not None:
        warn_of_other_data(run, checkpoint.document.get("data"), source.described())
    if resume_point.continues:
        run.loggers.resume(run.progress.global_step, checkpoint.document.get("loggers", []))
    warn_of_other_batch(run, checkpoint.document, loop.windows.step_samples)
    restore_rank(run, checkpoint, loop.windows)
    run.resume_from(checkpoint.path, resume_point.is_snapshot)


def _transfer_first(transfer: Callable[[Any, int], Any], batch: Any) -> Any:
    return transfer(batch, 0)
