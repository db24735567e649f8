"""The ``Strategy`` contract: how work and state are distributed over ranks.

A strategy is a class in ``strategies/``, exported there and named in the registry (see CONTRIBUTING.md). The rest of
phalanx reads its properties as data (``Traits``) and never checks a strategy's class. The user's module is never
replaced: a strategy that needs a wrapper wraps a ``StepAdapter``, whose ``forward`` calls the step passed to it.

A strategy has two companions: ``gradients`` for operations between backward and update, and ``state`` for checkpoints.
Their base classes suit a strategy that holds the full model on every rank. A strategy may have two more:
``Recovery``, for windows that are repeated where memory was short, and ``WindowPasses``, which runs the passes of a
window together. A pipeline works on several micro-batches at a time, and divides the model over ranks: only some of
them see the output of the user's step. The training loop prepares the micro-batches of a window, hands them over, and
updates afterwards.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.absent_names import lacks
from ..core.arguments import NamesArguments, NoArguments
from ..core.degrees import Degrees, listed
from ..core.errors import ConfigurationError
from ..core.foreign_names import MEMBERS
from ..core.optimizer_config import drop_gradients
from ..core.precision import Precision
from ..core.registry import STRATEGIES
from ..distributed.world import World
from .canonical_state import CanonicalState
from .gradient_operations import FullGradients, GradientOperations
from .meta_device import fill_from_rank_zero, move_others
from .sequence_part import SequencePart
from .step_flags import StepFlags

StepFunction = Callable[..., Any]


class Routed(Enum):
    """The code inside the functions that a strategy routes."""

    LOSS = "loss"
    """One forward pass, whose loss they return. Backward passes follow outside (automatic optimization)."""
    FORWARD = "forward"
    """One forward pass, with any output. Backward passes, if any, follow outside (Fabric, evaluation)."""
    STEP = "step"
    """Forward and backward passes and updates, in any order; any output (manual optimization)."""
    REPEATED = "repeated"
    """As ``LOSS``. A window whose passes ran out of memory on a rank is repeated, see ``Strategy.recovery``. Gradients
    may be reduced only in ``reduce_gradients``, which all ranks call once none has run out of memory."""


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that the rest of phalanx depends on, as data.

    Ranks that hold the same parameter hold equal values of it after each ``Strategy.step``. Strategies without this
    property, such as local SGD, are not supported.
    """

    shards_state: bool = False
    """Each rank holds a part of the parameters, gradients or optimizer state, and writes its part of a checkpoint."""
    takes_one_optimizer: bool = False
    """``setup`` takes a module together with exactly one optimizer."""
    owns_loss_scale: bool = False
    """The strategy scales losses in fp16 itself, for any precision, and skips updates that overflow."""
    forward_has_collectives: bool = False
    """All ranks must run the same number of forward passes, in evaluation too: parameters are gathered in them."""
    backward_has_collectives: bool = False
    """Gradients are reduced in the order in which backward passes produce them, so every rank must run real backward
    passes."""
    reduces_in_backward: bool = False
    """Gradients are averaged over ranks in a backward pass, at the latest in the last one of a window: none are left to
    be reduced after it."""
    weights_on_disk: bool = False
    """The weights that updates are applied to are stored on disk: canonical state is a copy, made on demand."""
    load_is_collective: bool = False
    """``CanonicalState.load_model_state`` distributes the tensors of one rank to all ranks, by a collective."""

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the full state, so that rank 0 alone can write it."""
        return not self.shards_state


Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class MemoryLayout:
    """The state that a strategy splits over ranks, and the place where it keeps it. The memory plan counts by it."""

    splits_parameters: bool = False
    splits_gradients: bool = False
    splits_state: bool = False
    replicates: bool = False
    """Every rank holds everything, and buckets in which gradients are reduced."""
    engine: bool = False
    """DeepSpeed's engine: updates are applied to fp32 master copies, and gradients accumulated in fp32."""
    parameters_on: Place = "device"
    state_on: Place = "device"
    """The place of optimizer state and master copies. Unless it is the device, gradients accumulate on the host."""
    within_node: bool = False
    """Whether to split over the ranks of a node and replicate over nodes; a single node has two replicas."""


# ---- companions that few strategies need -----------------------------------------------------------------------------

Repeat = Callable[[Optimizer, Callable[[], Any]], Any]
"""Calls a function that steps an optimizer, a second time if it ran out of memory before it had changed anything."""


class Recovery(NoArguments):
    """Base class, for strategies whose passes and updates contain no collective after a set-up for ``REPEATED``."""

    def begin_pass(self) -> None:
        """Begin the forward and backward pass of a micro-batch."""

    def end_pass(self) -> None:
        """End a pass that had enough memory on this rank."""

    def join(self) -> None:
        """Call the collectives of a pass that this rank has not called since it ran out of memory. Collective.

        It is called in place of ``end_pass``, and for every pass that follows in the window.
        """

    def end_window(self) -> None:
        """Note that no rank has run out of memory in the window. On all ranks."""

    def refresh(self) -> None:
        """Note that the passes may change from now on. On all ranks."""

    def update(self, optimizer: Optimizer, step: Callable[[], bool], repeat: Repeat) -> bool:
        """Apply an update; repeat the part of it that contains no collective. Collective.

        Args:
            optimizer: the user's optimizer.
            step: applies the update, and returns whether it was applied.
            repeat: see ``Repeat``.
        """
        return bool(repeat(optimizer, step))


@dataclass(frozen=True)
class Window:
    """The micro-batches of this rank in one accumulation window."""

    number: int
    """The number of the window since the start of training, the same on all ranks and after a resumption."""
    batches: Sequence[Any]
    """The micro-batches, on the device; at least one."""
    step: Callable[[int], Any]
    """Runs the user's step on the micro-batch at a position, and returns its output. It may run several times."""
    finish: Callable[[int, Any], Tensor | None]
    """Takes the position of a micro-batch and the output of its step, and returns the loss for the backward pass,
    weighted and scaled; None if the micro-batch has none. It is called once for each position, on the ranks with
    ``computes_losses``, in any order."""


class WindowPasses(NoArguments, ABC):
    """Runs the forward and backward passes of windows; base class. Gradients add up in ``parameter.grad``."""

    computes_losses: bool = True
    """Whether this rank sees the outputs of the user's step. Known after ``Strategy.setup``."""

    def remark(self, sizes: Sequence[int], what: str) -> str | None:
        """Return a sentence on windows that leave ranks idle, to be shown once at the start of a fit; None without any.

        Args:
            sizes: the numbers of micro-batches that windows have.
            what: the argument that gives them.
        """
        return None

    def begin(self) -> None:
        """Prepare for the passes of a window; called on all ranks, also those without a micro-batch. Collective."""

    @abstractmethod
    def run(self, window: Window) -> None:
        """Run all passes of a window, without a reduction over ranks that read other data. Collective.

        Only ranks that read the same data take part; they have the same window.
        """

    @abstractmethod
    def share(self, values: Tensor, message: Any = None) -> tuple[Tensor, Any]:
        """Return values and a message of the rank that computes losses, on those that read the same data. Collective.

        Called after ``run``. What the user's steps kept in attributes on that rank is given to the others too.

        Args:
            values: numbers; on the other ranks a tensor of the same shape and dtype.
            message: any object that can be pickled; None, which costs nothing, on the other ranks.
        """


# ---- the contract ---------------------------------------------------------------------------------------------------


@lacks(MEMBERS["Strategy"])
class Strategy(NamesArguments, ABC):
    """Base class of strategies: the distribution of work and state over ranks.

    Methods marked "Collective" must be called by all ranks in the same order.
    """

    name: str
    traits: Traits = Traits()
    memory_layout: MemoryLayout | None = None
    """How the state is split over ranks, from which the memory plan estimates memory. If it is None, the plan has a row
    for this strategy only after it has rehearsed a step."""
    libraries: tuple[str, ...] = ("torch._dynamo",)
    """Modules that every rank imports before its first step; importing them must not initialize an accelerator. The
    ranks of a script are forked from a process that has imported them, unless one of them does initialize one. Any
    optimizer of torch imports the first. ``{device_type}`` in a name is replaced by the type of device of the ranks."""

    axes: tuple[str, ...] = ()
    """The axes along which this strategy arranges ranks, of those in ``phalanx.framework.core.degrees``."""
    rest: str = "dp_replicate"
    """The axis that takes the ranks that the degrees leave."""
    degrees: Degrees = Degrees()
    """The number of ranks along each axis, as far as it was given."""

    world: World
    precision: Precision
    fixes_parameters: bool = False
    """Whether ``setup`` fixes the trained parameters: none can be frozen, unfrozen or added to an optimizer later."""
    prevents_compiling: str = ""
    """The reason for which parts of a module cannot run compiled, and the next step, such as "gathers ...: leave ...";
    empty if they can. They are compiled before ``setup``, without their own hooks."""
    flags: StepFlags | None = None
    """The exchange of step flags, if ``setup`` made this strategy's gradient reduction carry them. None for a separate
    message, which works under every strategy."""

    gradients: GradientOperations = FullGradients()
    """The operations on gradients before an update. A strategy whose ranks do not hold full gradients in
    ``parameter.grad`` replaces it in ``connect`` or ``setup``."""
    recovery: Recovery | None = None
    """Operations for windows that are repeated, after a set-up for ``Routed.REPEATED``; None if it is not supported."""
    prevents_recovery: str = "whose passes contain collectives, which a rank that has run out of memory cannot join"
    """The reason for which there is no ``recovery``."""
    window_passes: WindowPasses | None = None
    """Runs the passes of a window together, where they cannot run one by one (pipelines). None: the training loop runs
    one pass after another."""
    filling: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns the context of a filler's forward or backward pass: one that takes part in the collectives of the others,
    and whose results do not count. It keeps the filler's values from the computation of other ranks."""
    part: SequencePart = SequencePart()
    """The part of each sequence that this rank computes, from ``connect`` on."""
    state: CanonicalState = CanonicalState()
    """The state that checkpoints save and load. A strategy whose ranks hold parts of it replaces it likewise."""

    # ---- checks and connection ------------------------------------------------------------------------------------

    def with_degrees(self, degrees: Degrees) -> Strategy:
        """Return a strategy with the same settings and the degrees of ``parallel=``. Called before ``check``.

        Raises:
            ConfigurationError: this strategy does not arrange ranks along one of the axes.
        """
        check_axes(degrees, self.name, self.axes)
        changed = self.clone()
        changed.degrees = degrees
        return changed

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse a configuration that this strategy does not support. Called before any process starts.

        Raises:
            ConfigurationError: the number of ranks, the device or the precision does not fit.
        """
        self.degrees.lay_out(world_size, self.rest)

    def check_module(self, module: nn.Module) -> None:
        """Refuse a module that this strategy does not support. Called before any process starts.

        Raises:
            ConfigurationError: the module breaks a rule of this strategy.
        """

    def prepare(self, device_type: str, precision: Precision) -> None:
        """Prepare this node. Called only on the first rank of each node, before the ranks connect."""

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group and take this rank's device. Collective."""
        self.precision = precision
        self.world = World.from_environment(device_type, num_nodes)
        self.world.share_data(self.degrees.lay_out(self.world.size, self.rest))
        return self.world

    # ---- set-up and steps -----------------------------------------------------------------------------------------

    def clone(self) -> Strategy:
        """Return a strategy with the same settings and ranks that holds no module. This strategy must not hold a module
        either."""
        return copy.copy(self)

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which large layers are built."""
        return nullcontext()

    def to_device(self, module: nn.Module, supplied: Collection[str] = ()) -> None:
        """Move a module to its device, as far as this must happen before ``setup``. Collective.

        Args:
            module: the module.
            supplied: canonical names of tensors whose values ``load_model_state`` replaces after ``setup``. Until then
                they need no values: they may be on the meta device, and are neither initialized nor broadcast. Tied
                tensors are named in all places.
        """
        fill_from_rank_zero(module, self.world, supplied)
        move_others(module, self.world.device)

    @abstractmethod
    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Set up a module that is on its device, and its optimizers. Collective.

        Args:
            module: the user's module.
            optimizers: its optimizers; none for evaluation.
            training: whether the module is trained.
            routed: the code inside the functions that ``route`` will be given.

        Returns:
            The optimizers to use. They are the user's objects, whose hyperparameters apply in every step; their groups
            hold the parameters that ``module.parameters()`` returns after this call.
        """

    @abstractmethod
    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return the function that the loop calls instead of the user's step, with the same arguments.

        One that is routed for evaluation may be called inside another routed function, where it calls ``step``.
        """

    def sync_gradients(self, enabled: bool) -> None:
        """Set whether the next forward and backward pass reduce gradients over ranks, or accumulate them locally."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of a loss that is already weighted; ``options`` are those of ``Tensor.backward``."""
        loss.backward(**options)

    def trainability_changed(self, module: nn.Module) -> bool:
        """Record parameters frozen or unfrozen since set-up, the same on all ranks; return whether to route again."""
        return False

    @abstractmethod
    def zero_backward(self) -> None:
        """Take part in the reduction of an optimizer step with a gradient of zero. Collective."""

    @abstractmethod
    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that were computed without reduction. Collective."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters before a window's first backward."""
        drop_gradients(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update; return whether it was applied. Collective.

        Afterwards all ranks that hold the same parameters must hold equal values of them.
        """
        optimizer.step()
        return True

    def sync_buffers(self, module: nn.Module) -> None:
        """Synchronize buffers over ranks, so that all ranks evaluate the model that is saved. Collective."""

    # ---- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Release the resources of ``setup``; the user's module keeps its trained weights.

        Also called after a failure, when other ranks may be gone, so it must not contain a collective. After a
        successful run, ``restore`` is called first.
        """

    def restore(self, module: nn.Module) -> None:
        """Restore the module's full, ordinary weights. Collective.

        If they were sharded, rank 0 gets them, and the parameters of other ranks are left on the meta device, unless
        the strategy was configured to gather on all ranks.
        """


class StepAdapter(nn.Module):
    """The private module that strategies wrap: it holds the user's module and calls the step that is passed to it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` inside the hooks of the wrapper around this adapter."""
        return step(*args, **kwargs)


def check_axes(degrees: Degrees, strategy: str, axes: Iterable[str]) -> None:
    """Refuse degrees along axes that a strategy does not have.

    Raises:
        ConfigurationError: there is such a degree; the message names the strategies that have the axis.
    """
    known = tuple(axes)
    for axis in degrees.used:
        if axis not in known:
            takes = f"takes {listed(known)}" if known else "takes no degrees"
            others = [name for name in STRATEGIES if name != strategy and _suits(name, degrees)]
            way = f"use {' or '.join(f'strategy={name!r}' for name in others)}, or leave" if others else "leave"
            raise ConfigurationError(f"{degrees} with strategy={strategy!r}, which {takes}: {way} {axis} out.")


def _suits(name: str, degrees: Degrees) -> bool:
    """Whether a registered strategy has all axes of degrees, and uses no others of its own accord.

    False if it cannot be loaded, or is a function that makes one.
    """
    try:
        strategy = STRATEGIES.load(name)
        return set(strategy.degrees.used) <= set(degrees.used) <= set(strategy.axes)
    except (ImportError, AttributeError):
        return False
