"""Rehearsal of an optimizer step as one rank among many that are not there.

The strategy's own set-up and a window of passes run on tensors without data, in a process group whose collectives
return at once. The passes are run by ``framework/window/passes.py``, as those of a fit:

    connect, configure_model, device, configure_optimizers, setup
    for each micro-batch: transfer, forward; after the first one drop the old gradients; backward
    clip, update

Optimizer state and the gradients of the step before are there, by an update without passes before the window.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..api.contracts import TrainerView
from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError
from ..core.optimizer_config import parameters_of, resolve_optimizers
from ..core.precision import DefaultDtype, Precision
from ..core.quantized_state import is_quantized, parts_of
from ..core.split_optimizer import optimizers_in
from ..core.torch_internals import FakeTensorMode, tree_map
from ..memory.communication import Traffic
from ..memory.formulas import Bytes
from ..memory.measure import copied
from ..parallel.fresh_batches import fresh
from ..parallel.meta_device import tensors_of
from ..parallel.optimizer_step import Updater
from ..parallel.parameter_names import canonical_names
from ..parallel.strategy import StepFunction, Strategy
from ..run.overrides import batch_transfer
from ..window.passes import Passes
from .absent_ranks import absent_ranks
from .recorder import Phase, Recorder, summed

# Windows of more micro-batches are computed from shorter ones.
_MOST_PASSES = 5


@dataclass(frozen=True)
class Part:
    """A module and its step, which is rehearsed."""

    module: TrainModule
    batch: Any
    """A micro-batch of a rank, before it is cut and transferred."""
    precision: Precision
    window: int = 1
    """Micro-batches of an optimizer step."""
    clipping: tuple[float | None, str] = (None, "norm")
    datamodule: DataModule | None = None
    prepare: Callable[[nn.Module], Any] | None = None
    """Changes how blocks keep activations."""
    updates_together: bool = False
    """Whether optimizers update all parameters of a group at once where they may choose, as they do on CUDA."""
    trainer: TrainerView | None = None
    """The Trainer, whose settings ``configure_optimizers`` may read."""


@dataclass(frozen=True)
class Rehearsed:
    """The step of a rank."""

    strategy: str
    world_size: int
    rank: int
    """The rank with the highest peak, of those that were rehearsed."""
    layout: str
    peak: Bytes
    """The bytes that the rank holds at the peak of the step. ``activations`` are all tensors of the passes; ``buckets``
    are gathered parameters, what is sent and received, and temporary memory of the update."""
    traffic: tuple[Traffic, ...]
    """The collectives of a step, but for the exchange of flags and objects."""


def rehearse(strategy: Strategy, part: Part, world_size: int, num_nodes: int = 1) -> Rehearsed:
    """Rehearse a step on each kind of rank; return that of the rank that holds most.

    This process must not be in a process group; no device is used and no process started.

    Args:
        strategy: holds no module, and has passed its checks.
        part: the module and its step. The module stays unchanged.
        world_size: the number of ranks.
        num_nodes: the number of nodes.

    Raises:
        Exception: code of the module, or of an optimizer, needs the values of tensors.
    """
    if strategy.window_passes is None and part.window > _MOST_PASSES:
        return _extended(strategy, part, world_size, num_nodes)
    layout = strategy.degrees.lay_out(world_size, strategy.rest)
    # Stages of a pipeline differ; of other ranks, the first holds the largest shard.
    kinds = [stage * layout.cp * layout.tp for stage in range(layout.pp)]
    found = [_Rank(strategy.clone(), part).run(rank, world_size, num_nodes) for rank in (*kinds[:2], *kinds[2:][-1:])]
    return max(found, key=lambda each: each.peak.total)


def _extended(strategy: Strategy, part: Part, world_size: int, num_nodes: int) -> Rehearsed:
    """Return the rehearsal of a long window, of which each micro-batch after the second adds the same collectives."""
    short, longer = (rehearse(strategy, replace(part, window=window), world_size, num_nodes) for window in (2, 3))
    before = {(each.operation, each.axis, each.ranks): each for each in short.traffic}
    traffic = []
    for each in longer.traffic:
        other, more = before[each.operation, each.axis, each.ranks], part.window - 3
        times = each.times + more * (each.times - other.times)
        traffic.append(replace(each, times=times, payload=each.payload + more * (each.payload - other.payload)))
    return replace(longer, traffic=tuple(traffic))


class _Rank:
    """The rehearsal of one rank."""

    def __init__(self, strategy: Strategy, part: Part) -> None:
        self._strategy, self._part = strategy, part
        self._recorder = Recorder()

    def run(self, rank: int, world_size: int, num_nodes: int) -> Rehearsed:
        """Run set-up and windows."""
        strategy, recorder = self._strategy, self._recorder
        with absent_ranks(rank, world_size), ExitStack() as stack:
            world = strategy.connect("cpu", num_nodes, self._part.precision)
            fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(recorder)
            stack.enter_context(warnings.catch_warnings())
            # Tensors without data have no address.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            module = self._build()
            optimizer = self._set_up(module)
            batch = tree_map(partial(_given, fake, recorder), self._part.batch)
            try:
                self._begin(module, optimizer)
                if strategy.window_passes is not None:
                    # The first window builds its schedule.
                    self._window(module, optimizer, [fresh(batch) for _ in range(self._part.window)])
                recorder.begin_step()
                self._window(module, optimizer, [fresh(batch) for _ in range(self._part.window)])
                layout = strategy.degrees.lay_out(world_size, strategy.rest)
                traffic = summed(recorder.calls, layout)
            finally:
                strategy.teardown()
                world.close()
        return Rehearsed(strategy.name, world_size, rank, str(layout), recorder.peak(), traffic)

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def _build(self) -> TrainModule:
        """Return the module on its device, with parameters that have no data."""
        strategy, part = self._strategy, self._part
        module = copied(part.module, _without_data).train()
        if part.trainer is not None:
            module.use_trainer(part.trainer)
        with strategy.building(), DefaultDtype(part.precision.parameter_dtype):
            module.configure_model()
        canonical = canonical_names(module)
        # All are "loaded later", so that none is initialized or sent.
        strategy.to_device(module, {canonical(name) for name, _ in tensors_of(module)})
        part.precision.convert_module(module)
        if part.prepare is not None:
            part.prepare(module)
        return module

    def _set_up(self, module: TrainModule) -> Optimizer:
        optimizers, _ = resolve_optimizers(module.configure_optimizers())
        if len(optimizers) != 1 or not module.automatic_optimization:
            raise ConfigurationError("Only steps of automatic optimization with one optimizer can be rehearsed.")
        (optimizer,) = self._strategy.setup(module, optimizers, training=True)
        for group in (group for each in optimizers_in(optimizer) for group in each.param_groups):
            if self._part.updates_together and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        self._recorder.mark("parameters", [*module.parameters(), *module.buffers()])
        return optimizer

    def _routed(self, module: TrainModule) -> StepFunction:
        context = self._part.precision.forward_context("cpu")

        def step(batch: Any, index: int) -> Any:
            with context or nullcontext():
                return module.training_step(batch, index)

        return self._strategy.route(step, True)

    # ---- a window --------------------------------------------------------------------------------------------------

    def _begin(self, module: TrainModule, optimizer: Optimizer) -> None:
        """Update once, so that the optimizer has its state, with the gradients that the step before has left."""
        recorder = self._recorder
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and not parameter.is_meta:
                parameter.grad = torch.empty_like(parameter)
        recorder.mark("gradients", [parameter.grad for parameter in module.parameters()])
        self._strategy.step(optimizer)
        recorder.mark("optimizer_state", _slots(optimizer))

    def _window(self, module: TrainModule, optimizer: Optimizer, batches: list[Any]) -> None:
        strategy, part, recorder = self._strategy, self._part, self._recorder
        recorder.enter(Phase.PASSES)
        transfer = batch_transfer(strategy.world.device, part.precision, module, part.datamodule, strategy.part)
        if transfer is not None:
            batches = [transfer(batch, 0) for batch in batches]
        (self._passes if strategy.window_passes is None else self._joint_passes)(module, optimizer, batches)
        recorder.mark_gradients()
        recorder.mark("gradients", [parameter.grad for parameter in module.parameters()])
        recorder.enter(Phase.UPDATE)
        value, algorithm = part.clipping
        if value is not None:
            Updater(strategy, None).clip(optimizer, value, algorithm)
        strategy.step(optimizer)

    def _passes(self, module: TrainModule, optimizer: Optimizer, batches: list[Any]) -> None:
        """Run the passes one after another."""
        step, passes = self._routed(module), Passes(self._strategy)
        passes.run(len(batches), _InTurn(passes, optimizer, self._recorder, partial(_call, step, batches)))

    def _joint_passes(self, module: TrainModule, optimizer: Optimizer, batches: list[Any]) -> None:
        """Let the strategy run the passes."""
        strategy, step = self._strategy, partial(_call, self._routed(module), batches)
        joint, losses = strategy.window_passes, torch.zeros(len(batches))
        assert joint is not None
        strategy.zero_grad(optimizer)
        joint.begin()
        weights = [1.0] * len(batches)
        Passes(strategy).run_together(joint, 0, batches, weights, step, lambda _, output: _loss_of(output))
        joint.share(losses)
        self._recorder.mark_gradients()
        strategy.reduce_gradients(parameters_of(optimizer))


class _InTurn:
    """The passes of a window that are run one after another."""

    def __init__(self, passes: Passes, optimizer: Optimizer, recorder: Recorder, step: Callable[[int], Any]) -> None:
        self._passes = passes
        self._optimizer = optimizer
        self._recorder = recorder
        self._step = step

    def forward(self, position: int) -> Tensor:
        """Return the loss of a micro-batch."""
        return _loss_of(self._step(position))

    def begin_backward(self) -> None:
        """Drop the gradients and flags of the previous step."""
        strategy = self._passes.strategy
        strategy.zero_grad(self._optimizer)
        if strategy.flags is not None:
            strategy.flags.reset()

    def backward(self, loss: Tensor | None, position: int, is_last: bool) -> None:
        """Run the backward pass of a micro-batch."""
        self._passes.backward(loss, 1.0, is_last)
        self._recorder.mark_gradients()


def _call(step: StepFunction, batches: list[Any], position: int) -> Any:
    return step(batches[position], position)


def _slots(optimizer: Optimizer) -> list[Any]:
    """Return the state of an optimizer, with the parts of quantized tensors."""
    slots = [slot for each in optimizers_in(optimizer) for held in each.state.values() for slot in held.values()]
    return [part for slot in slots for part in (parts_of(slot).values() if is_quantized(slot) else (slot,))]


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _given(fake: FakeTensorMode, recorder: Recorder, leaf: Any) -> Any:
    """Return a tensor of the batch without data; that of whole numbers keeps them, as shapes may depend on them."""
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = fake.from_tensor(leaf)
    if not leaf.is_floating_point():
        recorder.values.give(tensor, leaf)
    return tensor


def _loss_of(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError("training_step returned None for the first batch.")
    return loss


class TimeLimit(TorchFunctionMode):
    """Context in which functions of torch raise ``TimeoutError`` once a number of seconds have passed.

    A loop that waits for a value may never end in a rehearsal, where all values are 1.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it takes more than {self._seconds:.0f} seconds")
        return func(*args, **(kwargs or {}))
