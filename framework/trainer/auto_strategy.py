"""``Trainer.plan``, which estimates memory, and the choices of ``"auto"`` for strategies and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..core.registry import STRATEGIES
from ..core.wording import counted
from ..launch import forked_ranks_can_use_cuda, launch_function
from ..memory.alternatives import first_micro_batch
from ..memory.available_memory import Memory, available_memory, bytes_of
from ..memory.formulas import LAYOUTS
from ..memory.measure import size_of, without_data
from ..memory.memory_plan import MemoryPlan, candidates, fits_easily, make_plan
from ..memory.ranks import Ranks
from ..run.overrides import is_overridden
from ..system.environment import nvme_path
from .model_measurements import Measurements, measure, rank_device
from .rehearsals import WHOLE_LAYERS, refusal_of, with_rehearsal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..api.train_module import TrainModule
    from ..parallel.resources import Resources
    from .plan_target import PlanTarget
    from .session import Session, StageRequest


def plan_memory(
    session: Session, request: StageRequest, activation_bytes: int | None, target: PlanTarget
) -> MemoryPlan:
    """Return the plan. No ranks are started."""
    if _needs_child(session.fabric.resources):
        # Here, the opened device would keep its memory, and no rank could be forked afterwards.
        plan = launch_function(_plan_here, (session, request, activation_bytes, target), 1, uses_cuda=True)
    else:
        plan = _plan_here(session, request, activation_bytes, target)
    return plan if target.rehearse is None else with_rehearsal(session, request, plan, target)


def _needs_child(resources: Resources) -> bool:
    """Whether only the ranks, which are still to be started, should open CUDA devices, and this process has not."""
    return resources.must_launch and resources.device_type == "cuda" and forked_ranks_can_use_cuda()


def _plan_here(session: Session, request: StageRequest, activation_bytes: int | None, target: PlanTarget) -> MemoryPlan:
    resources = session.fabric.resources
    module = request.module
    # If ranks are still to be started, this process continues to hold its own copy of the model next to theirs.
    memory = _memory(resources, () if resources.must_launch else _tensors(module))
    measured = measure(session, request, memory, activation_bytes)
    machines = target.resources(resources)
    own = _memory(machines, () if machines.must_launch else _tensors(module))
    memory = target.memory(own, machines.devices)
    if not memory.device_is_host:
        machines = replace(machines, device_type="cuda")
    return _plan(session, module, memory, measured, machines)


def choose_strategy(session: Session, request: StageRequest) -> None:
    """Choose the strategy of a fit with ``strategy="auto"``, and use it. Collective.

    A model that takes only a small part of the memory is not measured, and nothing is printed. Otherwise all ranks run
    a micro-batch at the same time, since the user's step may contain collectives, and decide by the same numbers.
    """
    resources = session.fabric.resources
    if not resources.auto:
        return
    world, module = session.fabric.world, request.module
    # Every rank must choose the same strategy, so each decision below uses only gathered values.
    memory = _agreed_memory(session, module)
    name = candidates(world.size)[0]
    if not _is_small(module, resources, memory):
        plan = _agreed_plan(session, request, memory, tuple(LAYOUTS))
        if session.settings.verbose:
            session.note(plan.table(candidates(world.size)))
        name = plan.chosen
    if name != resources.strategy.name:
        session.fabric.use_strategy(STRATEGIES.load(name)())


def choose_micro_batch(session: Session, request: StageRequest) -> None:
    """Choose the size that a fit with ``micro_batch_size="auto"`` begins with, by a plan. Collective.

    Without an estimate, or if even one sample would not fit by it, that is a rank's whole part of a global batch.
    """
    whole = session.settings.global_batch
    session.begin_micro_batches_with(None if whole is None else whole.first)
    if whole is None or not whole.is_found or whole.first is not None:
        return
    resources, name = session.fabric.resources, session.fabric.strategy.name
    plan = _agreed_plan(session, request, _agreed_memory(session, request.module), (name,))
    share = whole.share(resources.data_size)
    size = first_micro_batch(plan, name, resources.precision, share)
    session.begin_micro_batches_with(size)
    if size is not None and size < share:
        session.note(
            f"micro_batch_size='auto' begins with {counted(size, 'sample')} of the {share} of a rank, since by the "
            f"memory plan more do not fit; 'auto:{share}' begins with all of them."
        )


def _agreed_memory(session: Session, module: TrainModule) -> Memory:
    """Return the least memory of all ranks. Collective."""
    own = _memory(session.fabric.resources, _tensors(module))
    return own.least(session.fabric.world.all_gather_object(own))


def _agreed_plan(session: Session, request: StageRequest, memory: Memory, names: Sequence[str]) -> MemoryPlan:
    """Measure the model on all ranks; return a plan, the same on each, for the strategies ``names``. Collective."""
    measured = session.fabric.world.all_gather_object(measure(session, request, memory, None))
    return _plan(session, request.module, memory, _maximum(measured), session.fabric.resources, names)


def _is_small(module: TrainModule, resources: Resources, memory: Memory) -> bool:
    try:
        built = without_data(module) if is_overridden("configure_model", module) else module
    except Exception:  # user code may raise anything on tensors without data
        return False
    return fits_easily(size_of(built), _ranks(resources), resources.precision, memory)


def _plan(
    session: Session,
    module: TrainModule,
    memory: Memory,
    measured: Measurements,
    resources: Resources,
    names: Sequence[str] = tuple(LAYOUTS),
) -> MemoryPlan:
    refusals = {
        name: refusal
        for name in names
        if (refusal := refusal_of(name, resources, module, measured.optimizers, session.settings.clipping)) is not None
    }
    notes = measured.notes
    if "tp" in resources.degrees.used:
        notes += (WHOLE_LAYERS,)
    return make_plan(
        measured.size,
        _ranks(resources),
        resources.precision,
        resources.device_type,
        memory,
        measured.activations,
        refusals,
        notes,
        accumulates=session.accumulation.constant != 1 or session.settings.global_batch is not None,
        data=measured.data,
    )


def _maximum(measured: list[Measurements]) -> Measurements:
    """Return the measurements of all ranks in one, with the largest activations."""
    known = [each.activations for each in measured if each.activations is not None]
    notes = dict.fromkeys(note for each in measured for note in each.notes)
    return replace(measured[0], activations=max(known, key=lambda each: each.kept, default=None), notes=tuple(notes))


def _ranks(resources: Resources) -> Ranks:
    return Ranks(resources.world_size, resources.devices, resources.degrees)


def _memory(resources: Resources, tensors: Iterator[Tensor] | tuple[()]) -> Memory:
    return available_memory(rank_device(resources), resources.devices, nvme_path(), bytes_of(tensors))


def _tensors(module: TrainModule) -> Iterator[Tensor]:
    yield from (parameter.detach() for parameter in module.parameters())
    yield from module.buffers()
