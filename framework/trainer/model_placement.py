"""Building of a run's model, its move to the device, and the loading of its pretrained weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..parallel.compilation import is_compiled
from ..parallel.strategy_checks import check_placed
from ..parallel.supplied import SuppliedValues
from ..parallel.sync_batch_norm import share_batch_statistics
from ..pretrained import plan_loading
from ..pretrained.request import initialize_rest
from ..pretrained.transformers_models import empty_tensors

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint
    from ..pretrained.loading import LoadPlan
    from ..run.run import Run
    from .session import Session, StageRequest


def place_model(
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


def load_pretrained(run: Run, plan: LoadPlan | None) -> None:
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
