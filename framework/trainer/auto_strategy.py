"""``Trainer.plan``, which estimates memory, and the choice of ``strategy="auto"``, which is based on it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.errors import ConfigurationError, PhalanxError
from ..core.position_rng import RandomStream
from ..core.registry import STRATEGIES
from ..data.combined_source import prepare_training
from ..distributed.devices import device_of
from ..distributed.world import World
from ..launch import forked_ranks_can_use_cuda, launch_function
from ..memory.available_memory import Memory, available_memory, bytes_of
from ..memory.formulas import LAYOUTS, ModelSize
from ..memory.measure import (
    Activations,
    measure_with_data,
    measure_with_fake_tensors,
    optimizer_state,
    size_of,
    without_data,
)
from ..memory.memory_plan import MemoryPlan, TrainingData, candidates, casts_of, fits_easily, make_plan
from ..memory.ranks import Ranks
from ..run.overrides import batch_transfer, is_overridden
from ..system.environment import nvme_path
from .data_sources import Data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..api.train_module import TrainModule
    from ..parallel.resources import Resources
    from .plan_target import PlanTarget
    from .session import Session, StageRequest

# Errors that mean a strategy cannot be used on this machine.
_REFUSALS = (PhalanxError, ImportError, OSError)


@dataclass(frozen=True)
class _Measurements:
    """Measurements of a model on one rank."""

    size: ModelSize
    activations: Activations | None = None
    data: TrainingData | None = None
    optimizers: int = 1
    notes: tuple[str, ...] = ()


# ---- a plan -------------------------------------------------------------------------------------------------------


def plan_memory(
    session: Session, request: StageRequest, activation_bytes: int | None, target: PlanTarget
) -> MemoryPlan:
    """Return the plan. No ranks are started."""
    if _needs_child(session.fabric.resources):
        # Here, the opened device would keep its memory, and no rank could be forked afterwards.
        return launch_function(_plan_here, (session, request, activation_bytes, target), 1, uses_cuda=True)
    return _plan_here(session, request, activation_bytes, target)


def _needs_child(resources: Resources) -> bool:
    """Whether only the ranks, which are still to be started, should open CUDA devices, and this process has not."""
    return resources.must_launch and resources.device_type == "cuda" and forked_ranks_can_use_cuda()


def _plan_here(session: Session, request: StageRequest, activation_bytes: int | None, target: PlanTarget) -> MemoryPlan:
    resources = session.fabric.resources
    module = request.module
    # If ranks are still to be started, this process continues to hold its own copy of the model next to theirs.
    memory = _memory(resources, () if resources.must_launch else _tensors(module))
    measured = _measure(session, request, memory, activation_bytes)
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
    own = _memory(resources, _tensors(module))
    memory = own.least(world.all_gather_object(own))
    name = candidates(world.size)[0]
    if not _is_small(module, resources, memory):
        measured = world.all_gather_object(_measure(session, request, memory, None))
        plan = _plan(session, module, memory, _maximum(measured), resources)
        if session.settings.verbose:
            session.note(plan.table(candidates(world.size)))
        name = plan.chosen
    if name != resources.strategy.name:
        session.fabric.use_strategy(STRATEGIES.load(name)())


def _is_small(module: TrainModule, resources: Resources, memory: Memory) -> bool:
    try:
        built = without_data(module) if is_overridden("configure_model", module) else module
    except Exception:  # user code may raise anything on tensors without data
        return False
    return fits_easily(size_of(built), _ranks(resources), resources.precision, memory)


def _plan(
    session: Session, module: TrainModule, memory: Memory, measured: _Measurements, resources: Resources
) -> MemoryPlan:
    refusals = {
        name: refusal
        for name in LAYOUTS
        if (refusal := _refusal(name, resources, module, measured.optimizers, session.settings.clipping)) is not None
    }
    notes = measured.notes
    if "tp" in resources.degrees.used:
        notes += ("Layers that tp splits count in full, so each rank needs less than this.",)
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


def _maximum(measured: list[_Measurements]) -> _Measurements:
    """Return the measurements of all ranks in one, with the largest activations."""
    known = [each.activations for each in measured if each.activations is not None]
    notes = dict.fromkeys(note for each in measured for note in each.notes)
    return replace(measured[0], activations=max(known, key=lambda each: each.kept, default=None), notes=tuple(notes))


def _refusal(
    name: str, resources: Resources, module: TrainModule, optimizers: int, clipping: tuple[float | None, str]
) -> str | None:
    """Return why a strategy cannot be used here, by the checks that ``fit`` makes; None if it can."""
    try:
        # Without arguments, as "auto" would construct it: zero3-nvme then takes its folder from the environment.
        strategy = STRATEGIES.load(name)().with_degrees(resources.degrees)
        strategy.check(resources.world_size, resources.device_type, resources.num_nodes, resources.precision)
        strategy.check_module(module)
    except _REFUSALS as error:
        return str(error)
    if optimizers > 1 and strategy.traits.takes_one_optimizer:
        return f"It supports one optimizer, and there are {optimizers} optimizers."
    if clipping[0] is not None and clipping[1] == "value" and not strategy.traits.replicates:
        return "It clips only by norm."
    return None


def _ranks(resources: Resources) -> Ranks:
    return Ranks(resources.world_size, resources.devices, resources.degrees)


def _memory(resources: Resources, tensors: Iterator[Tensor] | tuple[()]) -> Memory:
    return available_memory(_device(resources), resources.devices, nvme_path(), bytes_of(tensors))


def _tensors(module: TrainModule) -> Iterator[Tensor]:
    yield from (parameter.detach() for parameter in module.parameters())
    yield from module.buffers()


# ---- measuring the model ------------------------------------------------------------------------------------------


def _measure(session: Session, request: StageRequest, memory: Memory, activation_bytes: int | None) -> _Measurements:
    """Measure a model's size, its optimizers' state and its activations. Failed measurements leave a note.

    User code runs on copies here, outside a run. It may raise anything, which must not prevent training.
    """
    resources, module = session.fabric.resources, request.module
    notes: list[str] = []
    # Each part is measured independently, so that one failure leaves the others accurate.
    size, built = size_of(module), None
    try:
        built = without_data(module)
        size = size_of(built)
        # configure_optimizers may read settings, such as the number of epochs.
        built.use_trainer(session.view)
    except Exception as error:
        notes.append(f"Layers that configure_model builds are not counted: {_summary(error)}")
    optimizers = 1
    try:
        held = optimizer_state(built or module, resources.precision, resources.device_type)
        size = replace(size, state_slots=held.slots, state_bytes=held.state_bytes, update_bytes=held.update_bytes)
        optimizers = held.count
    except Exception as error:
        notes.append(f"Optimizer state is counted as Adam's: {_summary(error)}")
    activations, data = None, None
    if activation_bytes is not None:
        activations = Activations(activation_bytes, casts_of(size, resources.precision))
    else:
        try:
            batch, data = _first_batch(session, request)
            activations = _activations(session, request, batch, size, memory)
        except Exception as error:
            notes.append(f"Activations could not be measured, and count as 0: {_summary(error)}")
    return _Measurements(size, activations, data, optimizers, tuple(notes))


def _summary(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0] or "no reason given"
    return f"{type(error).__name__}: {text}{'' if text.endswith('.') else '.'}"


def _activations(session: Session, request: StageRequest, batch: Any, size: ModelSize, memory: Memory) -> Activations:
    """Run the forward pass of a micro-batch, and on CUDA its backward pass, on a copy of the module.

    The copy has data if that takes at most half of the memory; otherwise it consists of fake tensors.
    """
    resources, module = session.fabric.resources, request.module
    if not module.automatic_optimization:
        raise ConfigurationError("a step under manual optimization updates weights, so it is not run before training.")
    precision, device = resources.precision, _device(resources)
    prepare = None if session.settings.memory is None else session.settings.memory.apply
    # The copy, its gradients, and as much again for activations.
    if 3 * size.elements * precision.parameter_dtype.itemsize >= memory.device / 2:
        return measure_with_fake_tensors(module, batch, precision, prepare)
    transfer = batch_transfer(device, precision, module, request.datamodule)
    try:
        given = batch if transfer is None else transfer(batch, 0)
        return measure_with_data(module, given, device, precision, prepare)
    finally:
        if device.type == "cuda":
            # torch would keep what the copy took, out of reach of other processes.
            torch.cuda.empty_cache()


def _device(resources: Resources) -> torch.device:
    return device_of(resources.device_type, resources.place, resources.indices)


def _first_batch(session: Session, request: StageRequest) -> tuple[Any, TrainingData]:
    """Return this rank's first micro-batch and the size of the data. Generators and loaders are left unchanged."""
    settings, datamodule, resources = session.settings, request.datamodule, session.resources
    world = World(resources.place, _device(resources))
    # A shuffling loader draws from the global generators, and training has to find them as the user left them.
    with RandomStream(0).entered():
        if datamodule is not None:
            # Attributes that its hooks set are set on this copy.
            datamodule = copy.copy(datamodule)
            datamodule.prepare_data()
            datamodule.setup("fit")
        loaders = Data(world, request.module, datamodule, request.given, 0, True).loaders("train")
        # Reading an iterator would take its first batch away from training.
        if any(iter(leaf) is leaf for leaf in tree_leaves(loaders) if hasattr(leaf, "__next__")):
            raise ConfigurationError("the training data can be read only once.")
        whole = settings.global_batch
        if whole is not None and whole.is_found:
            whole = replace(whole, micro_batch_size=None)
        source = prepare_training(
            loaders,
            rank=world.rank,
            size=resources.world_size,
            seed=0,
            shard=settings.shards_data,
            sequential=bool(settings.overfit_batches),
            global_batch=whole,
        )
        samples = _samples(loaders) if settings.shards_data else None
        data = TrainingData(source.micro_batch_size, samples, getattr(loaders, "drop_last", False))
        first = next(source.start(0))
        return (first if whole is None else next(iter(first))), data


def _samples(loaders: Any) -> int | None:
    """Return the samples of an epoch; None if they are unknown."""
    try:
        return len(loaders.sampler)
    except (AttributeError, TypeError):
        return None
