"""Measurements of a model for a memory plan: its size, the state of its optimizers, and its activations."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import ConfigurationError
from ..core.position_rng import RandomStream
from ..core.torch_internals import tree_leaves
from ..data.combined_source import prepare_training
from ..distributed.devices import device_of, empty_caches
from ..distributed.world import World
from ..memory.formulas import ModelSize, Ranks
from ..memory.measure import (
    Activations,
    measure_with_data,
    measure_with_fake_tensors,
    optimizer_state,
    size_of,
    without_data,
)
from ..memory.memory_plan import TrainingData, casts_of, fits_easily
from ..parallel.fresh_batches import fresh
from ..parallel.sequence_part import SequencePart
from ..run.overrides import batch_transfer, cutting, is_overridden
from .data_sources import Data

if TYPE_CHECKING:
    from ..api.train_module import TrainModule
    from ..memory.available_memory import Memory
    from ..parallel.resources import Resources
    from .session import Session, StageRequest


@dataclass(frozen=True)
class Measurements:
    """Measurements of a model on one rank."""

    size: ModelSize
    activations: Activations | None = None
    data: TrainingData | None = None
    optimizers: int = 1
    notes: tuple[str, ...] = ()
    batch: Any = None
    """The micro-batch of this rank, before it is cut and transferred; None if none was read."""


def measure(session: Session, request: StageRequest, memory: Memory, activation_bytes: int | None) -> Measurements:
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
        notes.append(f"Layers that configure_model builds are not counted: {summary_of(error)}")
    optimizers = 1
    try:
        with session.records.assuming_length():
            held = optimizer_state(built or module, resources.precision, resources.device_type)
        size = replace(size, state_slots=held.slots, state_bytes=held.state_bytes, update_bytes=held.update_bytes)
        optimizers = held.count
    except Exception as error:
        notes.append(f"Optimizer state is counted as Adam's: {summary_of(error)}")
    activations, data, batch = None, None, None
    if activation_bytes is not None:
        activations = Activations(activation_bytes, casts_of(size, resources.precision))
    else:
        try:
            batch, data = first_batch(session, request)
            activations = _activations(session, request, fresh(batch), size, memory)
        except Exception as error:
            notes.append(f"Activations could not be measured, and count as 0: {summary_of(error)}")
    return Measurements(size, activations, data, optimizers, tuple(notes), batch)


def summary_of(error: Exception) -> str:
    """Return an error in one line."""
    text = str(error).strip().partition("\n")[0] or "no reason given"
    return f"{type(error).__name__}: {text}{'' if text.endswith('.') else '.'}"


def _activations(session: Session, request: StageRequest, batch: Any, size: ModelSize, memory: Memory) -> Activations:
    """Run the forward pass of a micro-batch, and on CUDA its backward pass, on a copy of the module.

    The copy has data if that takes at most half of the memory; otherwise it consists of fake tensors.
    """
    resources, module = session.fabric.resources, request.module
    if not module.automatic_optimization:
        raise ConfigurationError("a step under manual optimization updates weights, so it is not run before training.")
    precision, device = resources.precision, rank_device(resources)
    prepare = None if session.settings.memory is None else session.settings.memory.apply
    part = SequencePart(0, resources.layout.cp)
    # The copy, its gradients, and as much again for activations.
    if 3 * size.elements * precision.parameter_dtype.itemsize >= memory.device / 2:
        cut = cutting(module, part)
        return measure_with_fake_tensors(module, batch if cut is None else cut(batch), precision, prepare)
    transfer = batch_transfer(device, precision, module, request.datamodule, part)
    try:
        given = batch if transfer is None else transfer(batch, 0)
        return measure_with_data(module, given, device, precision, prepare)
    finally:
        # torch would keep what the copy took, out of reach of other processes.
        empty_caches()


def rank_device(resources: Resources) -> torch.device:
    return device_of(resources.device_type, resources.place, resources.indices)


def first_batch(session: Session, request: StageRequest) -> tuple[Any, TrainingData]:
    """Return this rank's first micro-batch and the size of the data. Generators and loaders are left unchanged."""
    settings, resources = session.settings, session.resources
    world = World(resources.place, rank_device(resources))
    # A shuffling loader draws from the global generators, and training has to find them as the user left them.
    with RandomStream(0).entered():
        if request.datamodule is not None:
            # Attributes that its hooks set are set on this copy.
            datamodule = copy.copy(request.datamodule)
            datamodule.prepare_data()
            datamodule.setup("fit")
            request = replace(request, datamodule=datamodule)
        loaders = Data(world, request, 0, True).loaders("train")
        # Reading an iterator would take its first batch away from training.
        if any(iter(leaf) is leaf for leaf in tree_leaves(loaders) if hasattr(leaf, "__next__")):
            raise ConfigurationError("the training data can be read only once.")
        whole = settings.global_batch
        if whole is not None and whole.is_found:
            whole = replace(whole, micro_batch_size=None)
        source = prepare_training(
            loaders,
            rank=world.rank // resources.layout.copies,
            size=resources.data_size,
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


def is_small(module: TrainModule, resources: Resources, memory: Memory) -> bool:
    """Whether the model takes so little of the memory that ``strategy="auto"`` looks no further."""
    try:
        built = without_data(module) if is_overridden("configure_model", module) else module
    except Exception:  # user code may raise anything on tensors without data
        return False
    return fits_easily(size_of(built), ranks_of(resources), resources.precision, memory)


def ranks_of(resources: Resources) -> Ranks:
    """Return the ranks as formulas take them."""
    return Ranks(resources.world_size, resources.devices, resources.degrees)
