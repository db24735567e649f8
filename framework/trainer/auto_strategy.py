"""From a Trainer, a module and its data to a ``MemoryPlan``; and what ``strategy="auto"`` makes of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError, PhalanxError
from ..core.position_rng import RandomStream
from ..core.registry import STRATEGIES
from ..data.combined_source import prepare_training
from ..distributed.world import World
from ..fabric.collectives import RankVerbs
from ..memory.available_memory import Memory, bytes_of, memory_there
from ..memory.formulas import LAYOUTS, ModelSize, Ranks
from ..memory.measure import (
    Activations,
    optimizer_state,
    run_for_real,
    run_on_shapes,
    shapes_alone,
    size_of,
)
from ..memory.memory_plan import MemoryPlan, candidates, fits_easily, make_plan
from ..parallel.resources import Resources
from ..run.batch_transfer import batch_transfer
from ..run.overrides import is_overridden
from ..system.environment import nvme_path
from .assembly import FitRequest
from .data_sources import Data

if TYPE_CHECKING:
    from .trainer import Trainer

_CANNOT_BE_ASKED = (PhalanxError, ImportError, OSError)


@dataclass(frozen=True)
class _Findings:
    """What one rank found out about a model."""

    size: ModelSize
    activations: Activations | None = None
    optimizers: int = 1
    notes: tuple[str, ...] = ()


# ---- a plan -------------------------------------------------------------------------------------------------------


def plan_memory(trainer: Trainer, request: FitRequest, activation_bytes: int | None) -> MemoryPlan:
    """Return the plan of one process that starts no ranks."""
    resources = trainer.fabric.resources
    module = request.module
    # Where ranks are still to be started, this process stays beside them, and keeps the model it holds.
    memory = _memory(resources, () if resources.must_launch else _tensors(module))
    findings = _look(trainer, request, memory, activation_bytes)
    return _plan(trainer, module, memory, findings)


def settle_strategy(trainer: Trainer, request: FitRequest) -> None:
    """Decide what ``strategy="auto"`` stands for in a fit, alike on all ranks, and take it. Collective.

    Where the model takes but a small part of the memory, nothing is measured and nothing is said. Else every rank runs
    a micro-batch, all at once, since a step may hold collectives of the user's; and all decide by the same figures.
    """
    resources = trainer.fabric.resources
    if not resources.auto:
        return
    world, module = trainer.fabric.world, request.module
    own = _memory(resources, _tensors(module))
    memory = own.least(world.all_gather_object(own))
    name = candidates(world.size)[0]
    if not _is_small(module, resources, memory):
        found = world.all_gather_object(_look(trainer, request, memory, None))
        plan = _plan(trainer, module, memory, _most(found))
        trainer.note(plan.table(candidates(world.size)))
        name = plan.chosen
    if name != resources.strategy.name:
        trainer.fabric.use_strategy(STRATEGIES.load(name)())


def _is_small(module: TrainModule, resources: Resources, memory: Memory) -> bool:
    try:
        built = shapes_alone(module) if is_overridden("configure_model", module) else module
    except Exception:  # a user's code on tensors without data may fail in any way
        return False
    return fits_easily(size_of(built), _ranks(resources), resources.precision, memory)


def _plan(trainer: Trainer, module: TrainModule, memory: Memory, findings: _Findings) -> MemoryPlan:
    resources = trainer.fabric.resources
    refusals = {
        name: refusal
        for name in LAYOUTS
        if (refusal := _refusal(name, resources, module, findings.optimizers, trainer.settings.clipping)) is not None
    }
    return make_plan(
        findings.size,
        _ranks(resources),
        resources.precision,
        resources.device_type,
        memory,
        findings.activations,
        refusals,
        findings.notes,
        accumulates=trainer.accumulation.constant != 1,
    )


def _most(found: list[_Findings]) -> _Findings:
    """Return what the ranks found, with the activations of the rank that keeps most."""
    known = [one.activations for one in found if one.activations is not None]
    notes = dict.fromkeys(note for one in found for note in one.notes)
    return replace(found[0], activations=max(known, key=lambda one: one.kept, default=None), notes=tuple(notes))


def _refusal(
    name: str, resources: Resources, module: TrainModule, optimizers: int, clipping: tuple[float | None, str]
) -> str | None:
    """Return why a strategy cannot be used here; it is asked as ``fit`` would ask it."""
    try:
        strategy = STRATEGIES.load(name)()
        strategy.check(resources.world_size, resources.device_type, resources.num_nodes, resources.precision)
        strategy.check_module(module)
    except _CANNOT_BE_ASKED as error:
        return str(error)
    if optimizers > 1 and strategy.traits.takes_one_optimizer:
        return f"{optimizers} optimizers, and it takes one."
    if clipping[0] is not None and clipping[1] == "value" and not strategy.traits.replicates:
        return "It clips by norm alone."
    return None


def _ranks(resources: Resources) -> Ranks:
    return Ranks(resources.world_size, resources.devices)


def _memory(resources: Resources, tensors: Iterator[Tensor] | tuple[()]) -> Memory:
    return memory_there(resources.device_type, resources.devices, nvme_path(), bytes_of(tensors))


def _tensors(module: TrainModule) -> Iterator[Tensor]:
    yield from (parameter.detach() for parameter in module.parameters())
    yield from module.buffers()


# ---- looking at the model -----------------------------------------------------------------------------------------


def _look(trainer: Trainer, request: FitRequest, memory: Memory, activation_bytes: int | None) -> _Findings:
    """Find a model's size, its optimizers' state and its activations; what cannot be found is noted.

    User code runs on copies here, outside a run. It may fail in any way, which is no reason not to train.
    """
    resources, module = trainer.fabric.resources, request.module
    notes: list[str] = []
    size, built = size_of(module), None
    try:
        built = shapes_alone(module)
        size = size_of(built)
    except Exception as error:
        notes.append(f"Layers that configure_model builds are not counted: {_said(error)}")
    optimizers = 1
    try:
        slots, state_bytes, optimizers = optimizer_state(built or module, resources.precision)
        size = replace(size, state_slots=slots, state_bytes=state_bytes)
    except Exception as error:
        notes.append(f"Optimizer state is counted as Adam's: {_said(error)}")
    activations = None
    if activation_bytes is not None:
        casts = size.elements * resources.precision.compute_dtype.itemsize if resources.precision.is_mixed else 0
        activations = Activations(activation_bytes, casts)
    else:
        try:
            activations = _measure(trainer, request, size, memory)
        except Exception as error:
            notes.append(f"Activations could not be measured, and count as nothing: {_said(error)}")
    return _Findings(size, activations, optimizers, tuple(notes))


def _said(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0] or "no reason given"
    return f"{type(error).__name__}: {text}{'' if text.endswith('.') else '.'}"


def _measure(trainer: Trainer, request: FitRequest, size: ModelSize, memory: Memory) -> Activations:
    """Run a micro-batch's forward, and on CUDA its backward, on a copy.

    With data where that takes at most half of the memory; else on shapes alone.
    """
    fabric, module = trainer.fabric, request.module
    precision = fabric.precision
    if not module.automatic_optimization:
        raise ConfigurationError("with manual optimization a step updates weights, so it is not run ahead of training.")
    place = fabric.resources.place
    world = World(place, _device(fabric.resources))
    batch = _first_batch(trainer, request, world)
    # The copy, its gradients, and as much again for what it keeps.
    if 3 * size.elements * precision.parameter_dtype.itemsize < memory.device / 2:
        transfer = batch_transfer(_Here(fabric.resources, world), module, request.datamodule)
        return run_for_real(module, batch if transfer is None else transfer(batch, 0), world.device, precision)
    return run_on_shapes(module, batch, precision)


def _device(resources: Resources) -> torch.device:
    if resources.device_type != "cuda":
        return torch.device(resources.device_type)
    place = resources.place.local_rank
    return torch.device("cuda", place if resources.indices is None else resources.indices[place])


def _first_batch(trainer: Trainer, request: FitRequest, world: World) -> Any:
    """Return this rank's first micro-batch; generators and loaders stay as they were."""
    settings, datamodule = trainer.settings, request.datamodule
    with RandomStream(0).entered():
        if datamodule is not None:
            # What it sets on itself is for this copy.
            datamodule = copy.copy(datamodule)
            datamodule.prepare_data()
            datamodule.setup("fit")
        loaders = Data(world, request.module, datamodule, request.given, 0, True).loaders("train")
        if any(iter(leaf) is leaf for leaf in tree_leaves(loaders) if hasattr(leaf, "__next__")):
            raise ConfigurationError("the training data can be read only once.")
        source = prepare_training(
            loaders,
            rank=world.rank,
            size=trainer.world_size,
            seed=0,
            shard=trainer.use_distributed_sampler,
            sequential=bool(settings.overfit_batches),
        )
        return next(source.start(0))


class _Here(RankVerbs):
    """This process's device and precision, for a batch's way there; no ranks are started."""

    def __init__(self, resources: Resources, world: World) -> None:
        super().__init__(resources)
        self._world = world
        self.precision = resources.precision
