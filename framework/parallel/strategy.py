"""The ``Strategy`` contract: how work and state are spread over ranks.

A strategy is one file in ``strategies/`` and one line in the registry. What the rest of phalanx needs to know of it is
data (``Traits``), so that nobody ever asks for a strategy's class. The user's module is never replaced: a strategy that
has to wrap something wraps a ``StepAdapter``, whose ``forward`` calls the step it is handed.
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
"""An optimizer's state of one parameter by slot (``"exp_avg"``, ``"step"``): shards when taken, ``StoredTensor`` when
put back; numbers and 0-d tensors are themselves."""


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that the rest of phalanx depends on, as data."""

    shards_state: bool = False
    """Each rank holds a part of the parameters, gradients or optimizer state, so that every rank writes its part of a
    checkpoint, and gradients cannot be clipped by value."""
    takes_one_optimizer: bool = False
    """``setup`` takes a module together with exactly one optimizer."""
    owns_loss_scale: bool = False
    """The strategy scales losses in fp16 itself, and leaves out updates that overflow."""
    forward_has_collectives: bool = False
    """All ranks must run the same number of forward passes, in evaluation too: parameters are gathered in them."""
    backward_has_collectives: bool = False
    """Gradients are reduced in the order in which backward passes produce them, so every rank must run real ones."""
    reduces_in_backward: bool = False
    """Gradients leave every backward pass averaged over ranks: there are none of this rank alone to reduce later."""
    weights_on_disk: bool = False
    """The weights that updates are applied to lie on a disk: canonical state is a copy of them, made when asked for."""
    load_is_collective: bool = False
    """``load_model_state`` shows all ranks what one of them was given, by a collective."""

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the full state, so that rank 0 alone can write it."""
        return not self.shards_state


class Strategy(ABC):
    """How work and state are spread over ranks.

    Methods marked "Collective" must be called by all ranks in the same order.
    """

    name: str
    traits: Traits = Traits()
    libraries: tuple[str, ...] = ("torch._dynamo",)
    """Modules that every rank imports before its first step, none of which touches an accelerator as it is imported.
    The ranks of a script are forked from a process that has imported them. Any optimizer of torch imports the first."""

    world: World
    precision: Precision
    flags: StepFlags | None = None
    """How ranks agree on the flags of a step, where ``setup`` made this strategy's own reduction carry them. None for a
    message of its own, which works under every strategy."""

    routes_losses: bool = True
    """Whether what is routed returns losses. Set before ``setup``; if not, it returns anything."""

    routes_backward: bool = False
    """Whether backward passes, updates and further forward passes run inside what is routed. Set before ``setup``."""

    # ---- before the ranks meet ------------------------------------------------------------------------------------

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse what this strategy cannot run on. Called before any process starts.

        Raises:
            ConfigurationError: the number of ranks, the device or the precision does not fit.
        """

    def data_size(self, world_size: int) -> int:
        """Return into how many parts so many ranks share the data out: fewer where several compute one part."""
        return world_size

    def check_module(self, module: nn.Module) -> None:
        """Refuse a module that this strategy cannot take over. Called before any process starts.

        Raises:
            ConfigurationError: it breaks a rule of this strategy.
        """

    def prepare(self, device_type: str, precision: Precision) -> None:
        """Get ready what this node needs. Called on each node's first rank alone, before the ranks meet."""

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group and take this rank's device. Collective."""
        self.precision = precision
        self.world = World.from_environment(device_type, num_nodes)
        return self.world

    # ---- a module and its optimizers ------------------------------------------------------------------------------

    def clone(self) -> Strategy:
        """Return a strategy with the same settings and ranks that holds no module. This one must hold none either."""
        return copy.copy(self)

    def building(self) -> AbstractContextManager[Any]:
        """Return the context to build large layers in."""
        return nullcontext()

    def to_device(self, module: nn.Module) -> None:
        """Put a module on its device, as far as that is to happen before ``setup``."""
        fill_from_rank_zero(module, self.world)
        module.to(self.world.device)

    @abstractmethod
    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        """Take over a module that was placed, and its optimizers; return the optimizers to use. Collective.

        The optimizers that come back are the user's objects, whose hyperparameters count in every step; their groups
        hold the module's parameters as ``module.parameters()`` gives them from here on.
        """

    @abstractmethod
    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return what the loop calls instead of the user's step, with the same arguments."""

    def sync_gradients(self, enabled: bool) -> None:
        """Reduce gradients over ranks in the next forward and backward, or only keep them here."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of a loss that carries its weight already; ``options`` are those of ``Tensor.backward``."""
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
        """Return the whole gradient of a parameter that ``setup`` took over, of its full shape. Collective.

        It is what the update will apply, there between the backward that ends a window and the update. Where no loss
        fed the parameter it is None, or zeros where a strategy cannot leave one out of its update, as DeepSpeed's.
        """
        return parameter.grad

    def gradients_are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether no gradient of the coming update is NaN or infinite, the same on all ranks. Collective.

        Waits for the device.
        """
        return all_finite(gradients_of(parameters))

    def gradient_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, a 0-d tensor, the same on all ranks. Collective."""
        return nn.utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale gradients so that their norm, given as ``norm``, is at most ``max_norm``."""
        nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamp every gradient's elements to ``[-limit, limit]``.

        Raises:
            ConfigurationError: gradients are split, and their elements elsewhere.
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
        """Give every rank the same buffers, so that all evaluate the one model that is saved. Collective."""

    # ---- canonical state ------------------------------------------------------------------------------------------

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every tensor in a module's canonical state, by parameter and buffer name."""
        return {name: tuple(tensor.shape) for name, tensor in state_tensors(module).items()}

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's part of a module's canonical state, by parameter and buffer name. Collective.

        Parameters are in the dtype that updates are applied in: the fp32 copy where there is one.
        """
        return {name: Shard.whole(tensor.detach()) for name, tensor in state_tensors(module).items()}

    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Take over canonical state; what ``tensors`` lacks stays as it is. Collective."""
        own = state_tensors(module)
        with torch.no_grad():
            for name, stored in tensors.items():
                own[name].copy_(stored.read())

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each parameter that has state, as the optimizer's groups hold it, and its slots. Collective.

        Tensors of at least one dim come as ``Shard``, this rank's part of a tensor of the parameter's whole shape.
        """
        for parameter in parameters_of(optimizer):
            slots = optimizer.state.get(parameter)
            if slots:
                yield parameter, {slot: shard_if_tensor(value) for slot, value in slots.items()}

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the one whose ``step`` changes what ``optimizer_state`` yields; None if something else may, too.

        A save behind the training copies that state until the next ``step``.
        """
        return optimizer

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Put state back: the slots of each parameter, in the order of ``parameters_of``, and hyperparameters.

        ``groups`` are complete but for ``"params"``. Collective.
        """
        optimizer.load_state_dict(
            numbered(optimizer, [{k: whole_of(v) for k, v in slots.items()} for slots in state], groups)
        )

    def teardown(self) -> None:
        """Let go of what ``setup`` took; the module stays the user's, with its trained weights.

        Called after a failure too, when other ranks may never come: so it holds no collective. ``restore`` comes first
        where all went well.
        """

    def restore(self, module: nn.Module) -> None:
        """Give the module its whole, ordinary weights back. Collective.

        Where they were split, rank 0 gets them, and the parameters of other ranks are left on the meta device unless
        the strategy was asked to gather on all.
        """


class StepAdapter(nn.Module):
    """The private module that strategies wrap: it holds the user's and calls the step it is handed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` inside the hooks of whatever wraps this adapter."""
        return step(*args, **kwargs)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shard_if_tensor(value: Any) -> Any:
    """Return a tensor with dims as a whole ``Shard``, anything else as it is."""
    return Shard.whole(value) if isinstance(value, Tensor) and value.dim() > 0 else value


def whole_of(value: Any) -> Any:
    """Return what a ``StoredTensor`` holds, anything else as it is."""
    return value.read() if is_stored(value) else value


def is_stored(value: Any) -> bool:
    """Whether a slot's value is a tensor that is still to be read."""
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
    """Refuse clipping by value where a rank does not hold full gradients.

    Raises:
        ConfigurationError: the algorithm is ``"value"`` and the strategy shards its state.
    """
    if algorithm == "value" and strategy.traits.shards_state:
        raise ConfigurationError(
            f"gradient_clip_algorithm='value' needs whole gradients, and strategy={strategy.name!r} splits them: use "
            "'norm', which in a Fabric is clip_gradients(..., max_norm=...)."
        )
