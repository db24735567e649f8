"""The ``Strategy`` contract: how work and state are distributed over ranks.

A strategy is a class in ``strategies/``, exported there and named in the registry (see CONTRIBUTING.md). The rest of
phalanx reads its properties as data (``Traits``) and never checks a strategy's class. The user's module is never
replaced: a strategy that needs a wrapper wraps a ``StepAdapter``, whose ``forward`` calls the step passed to it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.finite_check import all_finite
from ..checkpoint.stored_tensor import StoredTensors
from ..checkpoint.write_plan import Shard
from ..core.errors import ConfigurationError
from ..core.precision import Precision
from ..distributed.world import World
from .meta_device import fill_from_rank_zero
from .parameter_names import state_tensors
from .step_flags import StepFlags

StepFunction = Callable[..., Any]
Slots = Mapping[str, Any]
"""The optimizer state of one parameter by slot (``"exp_avg"``, ``"step"``): ``Shard`` when saved, ``StoredTensor`` when
loaded; numbers and 0-d tensors are stored directly."""


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that the rest of phalanx depends on, as data."""

    shards_state: bool = False
    """Each rank holds a part of the parameters, gradients or optimizer state: every rank writes its part of a
    checkpoint, and gradients cannot be clipped by value."""
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
    """Every backward pass averages its gradients over ranks: there are no local gradients to reduce later."""
    weights_on_disk: bool = False
    """The weights that updates are applied to are stored on disk: canonical state is a copy, made on demand."""
    load_is_collective: bool = False
    """``load_model_state`` distributes the tensors of one rank to all ranks, by a collective."""

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the full state, so that rank 0 alone can write it."""
        return not self.shards_state


class Strategy(ABC):
    """Base class of strategies: the distribution of work and state over ranks.

    Methods marked "Collective" must be called by all ranks in the same order.
    """

    name: str
    traits: Traits = Traits()
    libraries: tuple[str, ...] = ("torch._dynamo",)
    """Modules that every rank imports before its first step; importing them must not initialize an accelerator. The
    ranks of a script are forked from a process that has imported them. Any optimizer of torch imports the first."""

    world: World
    precision: Precision
    flags: StepFlags | None = None
    """The exchange of step flags, if ``setup`` made this strategy's gradient reduction carry them. None for a separate
    message, which works under every strategy."""

    routes_losses: bool = True
    """Whether routed functions return losses; if not, they may return anything. Set before ``setup``."""

    routes_backward: bool = False
    """Whether backward passes, updates and further forward passes run inside routed functions. Set before ``setup``."""

    # ---- checks and connection ------------------------------------------------------------------------------------

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse a configuration that this strategy does not support. Called before any process starts.

        Raises:
            ConfigurationError: the number of ranks, the device or the precision does not fit.
        """

    def data_size(self, world_size: int) -> int:
        """Return the number of shards of the data; less than ``world_size`` if several ranks compute the same shard."""
        return world_size

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
        return self.world

    # ---- set-up and steps -----------------------------------------------------------------------------------------

    def clone(self) -> Strategy:
        """Return a strategy with the same settings and ranks that holds no module. This strategy must not hold a module
        either."""
        return copy.copy(self)

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which large layers are built."""
        return nullcontext()

    def to_device(self, module: nn.Module) -> None:
        """Move a module to its device, as far as this must happen before ``setup``."""
        fill_from_rank_zero(module, self.world)
        module.to(self.world.device)

    @abstractmethod
    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        """Set up a module that is on its device, and its optimizers; return the optimizers to use. Collective.

        The returned optimizers are the user's objects, whose hyperparameters apply in every step; their groups hold the
        parameters that ``module.parameters()`` returns after this call.
        """

    @abstractmethod
    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return the function that the loop calls instead of the user's step, with the same arguments."""

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

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply gradients in place."""
        gradients = gradients_of(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter that was passed to ``setup``. Collective.

        Available between the last backward pass of a window and the update, which will apply it. None if no loss
        depends on the parameter; zeros if a strategy cannot exclude a parameter from its update (DeepSpeed).
        """
        return parameter.grad

    def gradients_are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether no gradient of the coming update is NaN or infinite, the same on all ranks. Collective.

        Waits for the device.
        """
        return all_finite(gradients_of(parameters))

    def gradient_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the full gradient, a 0-d tensor, the same on all ranks. Collective."""
        return nn.utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale gradients so that their norm, given as ``norm``, is at most ``max_norm``."""
        nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamp every gradient's elements to ``[-limit, limit]``.

        Raises:
            ConfigurationError: gradients are sharded, so a rank does not hold all elements.
        """
        check_algorithm(self, "value")
        nn.utils.clip_grad_value_(list(parameters), limit)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters before a window's first backward."""
        optimizer.zero_grad()

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update; return whether it was applied. Collective."""
        optimizer.step()
        return True

    def sync_buffers(self, module: nn.Module) -> None:
        """Synchronize buffers over ranks, so that all ranks evaluate the model that is saved. Collective."""

    # ---- canonical state ------------------------------------------------------------------------------------------

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every tensor in a module's canonical state, by parameter and buffer name."""
        return {name: tuple(tensor.shape) for name, tensor in state_tensors(module).items()}

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's part of a module's canonical state, by parameter and buffer name. Collective.

        Parameters have the dtype in which updates are applied: the fp32 copy if there is one.
        """
        return {name: Shard.whole(tensor.detach()) for name, tensor in state_tensors(module).items()}

    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Load canonical state; tensors missing from ``tensors`` are unchanged. Collective."""
        own = state_tensors(module)
        with torch.no_grad():
            for name, stored in tensors.items():
                own[name].copy_(stored.read())

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each parameter that has state, as the optimizer's groups hold it, and its slots. Collective.

        Tensors of at least one dim are ``Shard`` objects: this rank's part of a tensor of the parameter's full shape.
        """
        for parameter in parameters_of(optimizer):
            slots = optimizer.state.get(parameter)
            if slots:
                yield parameter, {slot: shard_if_tensor(value) for slot, value in slots.items()}

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer whose ``step`` changes the tensors of ``optimizer_state``; None if other code may change
        them.

        An asynchronous save copies that state until the next ``step``.
        """
        return optimizer

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Load state: the slots of each parameter, in the order of ``parameters_of``, and hyperparameters.

        ``groups`` are complete except for ``"params"``. Collective.
        """
        optimizer.load_state_dict(
            numbered(optimizer, [{k: whole_of(v) for k, v in slots.items()} for slots in state], groups)
        )

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


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shard_if_tensor(value: Any) -> Any:
    """Wrap a tensor with dims in a ``Shard`` that covers it; return other values unchanged."""
    return Shard.whole(value) if isinstance(value, Tensor) and value.dim() > 0 else value


def whole_of(value: Any) -> Any:
    """Read the tensor of a ``StoredTensor``; return other values unchanged."""
    return value.read() if is_stored(value) else value


def is_stored(value: Any) -> bool:
    """Whether a slot's value is a tensor that has not been read yet."""
    return not isinstance(value, Tensor) and hasattr(value, "read_slice")


def numbered(optimizer: Optimizer, state: Sequence[Slots], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return state and hyperparameters in the form that ``Optimizer.load_state_dict`` takes."""
    numbers = iter(range(len(parameters_of(optimizer))))
    own = [
        {**group, "params": [next(numbers) for _ in kept["params"]]}
        for group, kept in zip(groups, optimizer.param_groups, strict=True)
    ]
    return {"state": {number: dict(slots) for number, slots in enumerate(state) if slots}, "param_groups": own}


def check_algorithm(strategy: Strategy, algorithm: str) -> None:
    """Refuse clipping by value if a rank does not hold full gradients.

    Raises:
        ConfigurationError: the algorithm is ``"value"`` and the strategy shards its state.
    """
    if algorithm == "value" and strategy.traits.shards_state:
        raise ConfigurationError(
            f"gradient_clip_algorithm='value' needs full gradients, and strategy={strategy.name!r} shards them: use "
            "'norm', which in a Fabric is clip_gradients(..., max_norm=...)."
        )
