"""``Trainer.plan``, which estimates memory, and the choices of ``"auto"`` for strategies and micro-batches."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from ..checkpoint.snapshot_slots import COPIES
from ..core.errors import ConfigurationError
from ..core.registry import STRATEGIES
from ..core.size_text import size_text
from ..core.wording import counted
from ..launch import forked_ranks_can_use_cuda, launch_function
from ..memory.available_memory import Memory, available_memory, bytes_of
from ..memory.memory_plan import MemoryPlan, counted_layouts, first_micro_batch, make_plan
from ..parallel.resources import candidates
from ..system.environment import nvme_path
from ..watchdog.heartbeat import LEARNED, SECTIONS
from .model_measurements import Measurements, is_small, measure, rank_device, ranks_of, summary_of
from .rehearsals import WHOLE_LAYERS, Rehearsals, by_formulas, confirmed, refusal_of, with_rehearsal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..api.train_module import TrainModule
    from ..parallel.resources import Resources
    from ..parallel.strategy import MemoryLayout
    from .plan_target import PlanTarget
    from .session import Session, StageRequest
    from .settings import TrainerSettings

_SET_UP = SECTIONS.index("set-up")


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
    plan = _plan(session, module, memory, measured, machines)
    notes = _snapshot_notes(session.requested, plan, resources.place.launcher)
    return plan.with_notes(*notes, *_verification_notes(session.requested, plan))


def _snapshot_notes(requested: TrainerSettings, plan: MemoryPlan, launcher: str | None) -> list[str]:
    """Return a note about the host memory that snapshots take, if the fit takes any."""
    is_asked = bool(requested.snapshots) or (requested.max_restarts > 0 and requested.snapshots is None)
    if not is_asked or launcher not in (None, "phalanx"):
        return []
    needed = COPIES * plan.size.checkpoint_bytes
    free = plan.memory.host * (plan.local_size or plan.world_size)
    verdict = "" if needed <= free else ", so none are taken, and restarts begin from checkpoints"
    return [f"snapshots take {size_text(needed)} of host memory on each node, of {size_text(free)}{verdict}."]


def _verification_notes(requested: TrainerSettings, plan: MemoryPlan) -> list[str]:
    """Return a note about the memory of verified steps, if the fit has any."""
    given = requested.strategy
    name = given if isinstance(given, str) and any(row.name == given for row in plan) else plan.chosen
    layout = plan[name].layout
    # An engine's update is not computed again, so that its state is not copied.
    if requested.verify_every is None or layout is None or layout.engine:
        return []
    held = plan[name].needs.device
    # By the time of the update, gradients of a window have been reduced to the rank's part.
    copies = size_text(held.parameters + min(held.gradients, held.parameters) + held.optimizer_state)
    return [f"a verified step takes copies of weights, gradients and optimizer state: {copies} more under {name}."]


def choose_strategy(session: Session, request: StageRequest) -> None:
    """Choose the strategy of a fit with ``strategy="auto"``, and use it. Collective.

    A model that takes only a small part of the memory is not measured, and nothing is printed. Otherwise all ranks run
    a micro-batch at the same time, since the user's step may contain collectives, and decide by the same numbers.
    """
    resources = session.fabric.resources
    if not resources.auto:
        return
    world = session.fabric.world
    # Every rank must choose the same strategy, so each decision below uses only gathered values.
    memory = _agreed_memory(session, request.module)
    names = candidates(world.size, resources.degrees)
    name = names[0]
    if not is_small(request.module, resources, memory):
        plan = _confirmed_by_a_rank(session, request, memory)
        if session.settings.verbose:
            session.note(plan.table(names))
        name = plan.chosen
    if name != resources.strategy.name:
        strategy = STRATEGIES.load(name)()
        session.fabric.use_strategy(strategy.with_degrees(resources.degrees) if resources.degrees.given else strategy)


def _confirmed_by_a_rank(session: Session, request: StageRequest, memory: Memory) -> MemoryPlan:
    """Return the plan of all ranks, confirmed on the one with the most activations. Collective."""
    world, resources = session.fabric.world, session.fabric.resources
    own, measured = _measured(session, request, memory)
    plan = _plan(session, request.module, memory, _maximum(measured), resources)
    kept = [-1 if each.activations is None else each.activations.kept for each in measured]
    busiest = kept.index(max(kept))
    if world.rank == busiest:
        rehearsals = Rehearsals(session, request, resources, lambda: _known(own))
        # Meanwhile no rank has a heartbeat.
        silence = session.settings.stall_limits[_SET_UP]
        if silence != LEARNED:
            rehearsals = replace(rehearsals, end=min(rehearsals.end, time.monotonic() + silence / 2))
        try:
            plan = confirmed(rehearsals, plan)
        except Exception as error:  # the other ranks wait for a plan
            plan = plan.with_notes(by_formulas(plan.chosen, summary_of(error)))
    return world.broadcast_object(plan, busiest)


def _known(own: Measurements) -> Any:
    if own.data is None:
        raise ConfigurationError("there is no batch.")
    return own.batch


def choose_micro_batch(session: Session, request: StageRequest) -> None:
    """Choose the size that a fit with ``micro_batch_size="auto"`` begins with, by a plan. Collective.

    Without an estimate, or if even one sample would not fit by it, that is a rank's whole part of a global batch.
    """
    whole = session.settings.global_batch
    session.first_micro_batch = None if whole is None else whole.first
    if whole is None or not whole.is_found or whole.first is not None:
        return
    resources, strategy = session.fabric.resources, session.fabric.strategy
    if strategy.memory_layout is None:
        return
    memory = _agreed_memory(session, request.module)
    _, measured = _measured(session, request, memory)
    plan = _plan(
        session, request.module, memory, _maximum(measured), resources, {strategy.name: strategy.memory_layout}
    )
    share = whole.share(resources.data_size)
    size = first_micro_batch(plan, strategy.name, resources.precision, share)
    session.first_micro_batch = size
    if size is not None and size < share:
        session.note(
            f"micro_batch_size='auto' begins with {counted(size, 'sample')} of the {share} of a rank, since by the "
            f"memory plan more do not fit; 'auto:{share}' begins with all of them."
        )


def _agreed_memory(session: Session, module: TrainModule) -> Memory:
    """Return the least memory of all ranks. Collective."""
    own = _memory(session.fabric.resources, _tensors(module))
    return own.least(session.fabric.world.all_gather_object(own))


def _measured(session: Session, request: StageRequest, memory: Memory) -> tuple[Measurements, list[Measurements]]:
    """Measure the model on all ranks at the same time; return this rank's measurements and all. Collective."""
    own = measure(session, request, memory, None)
    return own, session.fabric.world.all_gather_object(replace(own, batch=None))


def _plan(
    session: Session,
    module: TrainModule,
    memory: Memory,
    measured: Measurements,
    resources: Resources,
    layouts: Mapping[str, MemoryLayout] | None = None,
) -> MemoryPlan:
    """Return the plan of some strategies; None: all that the formulas know."""
    layouts = counted_layouts() if layouts is None else layouts
    refusals = {
        name: refusal
        for name in layouts
        if (refusal := refusal_of(name, resources, module, measured.optimizers, session.settings.clipping)) is not None
    }
    notes = measured.notes
    if "tp" in resources.degrees.used:
        notes += (WHOLE_LAYERS,)
    return make_plan(
        layouts,
        measured.size,
        ranks_of(resources),
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


def _memory(resources: Resources, tensors: Iterator[Tensor] | tuple[()]) -> Memory:
    return available_memory(rank_device(resources), resources.devices, nvme_path(), bytes_of(tensors))


def _tensors(module: TrainModule) -> Iterator[Tensor]:
    yield from (parameter.detach() for parameter in module.parameters() if not is_lazy(parameter))
    yield from module.buffers()
