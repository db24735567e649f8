"""The ``Strategy`` contract: how work and state are spread over ranks.

A strategy is one file in ``strategies/`` and one line in the registry. What the rest of phalanx needs to know of it is
data (``Traits``), so that nobody ever asks for a strategy's class. The user's module is never replaced: a strategy that
has to wrap something wraps a ``StepAdapter``, whose ``forward`` calls the step it is handed.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .precision import Precision
from .world import World

StepFunction = Callable[..., Any]


@dataclass(frozen=True)
class Traits:
    """What a strategy does, as data."""

    shards_parameters: bool = False
    shards_gradients: bool = False
    shards_optimizer_state: bool = False
    offloads: bool = False
    needs_optimizer_at_setup: bool = False
    owns_loss_scale: bool = False
    lockstep_forward: bool = False
    """Forward passes hold collectives, so all ranks must run the same number of them."""
    supports_several_optimizers: bool = True
    clips_by_value: bool = True

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the whole state, so that rank 0 alone can write it."""
        return not (self.shards_parameters or self.shards_optimizer_state)


class Strategy(ABC):
    """How work and state are spread over ranks.

    Methods marked "Collective" must be called by all ranks in the same order.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()

    world: World
    precision: Precision
    routes_losses: bool = True
    """Whether what is routed returns losses. Set before ``setup``; if not, it returns anything and ``contributed`` is
    not asked."""

    def check(self, world_size: int) -> None:
        """Refuse a number of ranks this strategy cannot run on. Called before any process starts.

        Raises:
            ConfigurationError: the number does not fit.
        """

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group and take this rank's device. Collective."""
        self.precision = precision
        self.world = World.from_environment(device_type, num_nodes)
        return self.world

    def another(self) -> Strategy:
        """Return a strategy like this one, of the same ranks, that holds no module. This one must hold none either."""
        return copy.copy(self)

    def building(self) -> AbstractContextManager[Any]:
        """Return the context to build large layers in."""
        return nullcontext()

    @abstractmethod
    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        """Take over a module that is on its device, and its optimizers; return the optimizers to use. Collective."""

    @abstractmethod
    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return what the loop calls instead of the user's step, with the same arguments."""

    def sync_gradients(self, enabled: bool) -> None:
        """Reduce gradients over ranks in the next forward and backward, or only keep them here."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of a loss that carries its weight already; ``options`` are those of ``Tensor.backward``."""
        loss.backward(**options)

    def refresh(self, module: nn.Module) -> bool:
        """Take note of parameters frozen or unfrozen since set-up, alike on all ranks; return whether to route anew."""
        return False

    @abstractmethod
    def idle_backward(self) -> None:
        """Take part in the reduction of an optimizer step with a gradient of zero. Collective."""

    def contributed(self) -> bool:
        """Whether any rank's loss took part since the last update. Asked only by a rank whose own did not."""
        return False

    @abstractmethod
    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that were computed without reduction. Collective."""

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply gradients in place."""
        gradients = gradients_of(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def gradient_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, a 0-d tensor, the same on all ranks. Collective."""
        return nn.utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale gradients so that their norm, given as ``norm``, is at most ``max_norm``."""
        nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamp every gradient's elements to ``[-limit, limit]``."""
        nn.utils.clip_grad_value_(list(parameters), limit)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters before a window's first backward."""
        optimizer.zero_grad()

    def forget_losses(self) -> None:
        """Start a window in which no rank has had a loss yet."""

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update; return whether it was applied. Collective."""
        optimizer.step()
        return True

    def sync_buffers(self, module: nn.Module) -> None:
        """Give every rank the same buffers, so that all evaluate the one model that is saved. Collective."""

    def model_state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return this rank's part of the canonical state of a module, by parameter and buffer name."""
        return module.state_dict()

    def load_model_state(self, module: nn.Module, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """Take over canonical state: ``read`` returns the tensor of a name. Collective."""
        own = module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name in names:
                own[name].copy_(read(name))

    def teardown(self) -> None:
        """Let go of what ``setup`` took; the module stays the user's, with its trained weights."""


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
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
