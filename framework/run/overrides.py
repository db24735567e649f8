"""What the loops need to know of the user's own code: what it overrides, how it is called, what it is handed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError, LoopError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from ..parallel.strategy import StepFunction, Strategy


class StrategyOptimizer:
    """An optimizer whose update and gradients are its strategy's; everything else is its own."""

    def __init__(self, optimizer: Optimizer, strategy: Strategy) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._applied = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the update, after the closure if there is one; return what that returns. Collective."""
        result = None if closure is None else closure()
        self._applied = self._strategy.step(self.optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        self._strategy.zero_grad(self.optimizer)

    def take_applied(self) -> bool:
        """Return whether what was asked for since the last call was applied."""
        applied, self._applied = self._applied, True
        return applied


def is_overridden(name: str, module: TrainModule) -> bool:
    """Whether a module's class overrides a method of TrainModule."""
    return getattr(type(module), name, None) is not getattr(TrainModule, name)


def in_context(step: StepFunction, context: AbstractContextManager[Any] | None) -> StepFunction:
    """Return ``step`` run inside a context that may be entered again."""
    if context is None:
        return step

    def run_in_context(*args: Any) -> Any:
        with context:
            return step(*args)

    return run_in_context


def with_arity(step: StepFunction, names: Sequence[str]) -> StepFunction:
    """Return ``step`` called with ``names`` as positional arguments, of which it may take only the first ones.

    Raises:
        LoopError: it takes more arguments than there are.
    """
    parameters = list(inspect.signature(step).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return step
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if p.default is p.empty]
    name = getattr(step, "__name__", "the step")
    if len(needed) > len(names) or not positional:
        raise LoopError(
            f"{name} takes ({', '.join(p.name for p in positional)}); it is called with ({', '.join(names)})."
        )
    count = min(len(names), len(positional))
    return step if count == len(names) else lambda *args: step(*args[:count])


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` cannot do without a closure that computes the loss."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def check_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss several times for an update.

    Raises:
        ConfigurationError: its ``step`` needs a closure.
    """
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} needs to evaluate the loss several times for an update. Set "
            "automatic_optimization = False and call its step(closure) in training_step."
        )
