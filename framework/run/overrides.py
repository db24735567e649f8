"""The user's code: overridden methods, signatures, the optimizers passed to it, and its transfer of batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..api import overriding
from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError, LoopError
from ..core.precision import Precision
from ..core.split_optimizer import needs_closure
from ..distributed.batch_copy import BatchCopy
from ..fabric.collectives import to_device
from ..parallel.sequence_part import SequencePart
from ..parallel.strategy import StepFunction, Strategy


class StrategyOptimizer:
    """An optimizer whose ``step`` and ``zero_grad`` are done by the strategy; other attributes are its own."""

    def __init__(self, optimizer: Optimizer, strategy: Strategy) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._applied = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, if given, and apply the update; return the closure's result. Collective."""
        result = None if closure is None else closure()
        self._applied = self._strategy.step(self.optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, or set them to zero."""
        if set_to_none:
            self._strategy.zero_grad(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def take_applied(self) -> bool:
        """Return whether the updates requested since the last call were applied."""
        applied, self._applied = self._applied, True
        return applied


def is_overridden(name: str, module: TrainModule) -> bool:
    """Whether a module overrides a method of TrainModule, in its class or on the object; None switches it off."""
    return overriding.is_overridden(name, module, TrainModule)


def unit_of(module: TrainModule) -> str:
    """Return the unit in which batches are counted: ``"tokens"`` if ``batch_weight`` is overridden, else samples."""
    return "tokens" if is_overridden("batch_weight", module) else "samples"


@dataclass(frozen=True)
class HookedLoss:
    """Passed to ``Strategy.backward`` in place of a loss: its ``backward`` is the module's own hook."""

    loss: Tensor
    hook: Callable[..., None]

    def backward(self, **options: Any) -> None:
        """Call the hook with the loss."""
        self.hook(self.loss, **options)


def backward_of(module: TrainModule, strategy: Strategy) -> Callable[..., None]:
    """Return the strategy's backward pass; it goes through the module's ``backward`` if that is overridden."""
    if not is_overridden("backward", module):
        return strategy.backward if overriding.is_overridden("backward", strategy, Strategy) else Tensor.backward
    # Typed as Any, since a strategy that allows the hook only calls `loss.backward()`.
    run, hook = cast("Callable[[Any], None]", strategy.backward), module.backward
    return lambda loss: run(HookedLoss(loss, hook))


def in_context(step: StepFunction, context: AbstractContextManager[Any] | None) -> StepFunction:
    """Return ``step`` wrapped in a reusable context manager."""
    if context is None:
        return step

    def run_in_context(*args: Any) -> Any:
        with context:
            return step(*args)

    return run_in_context


def with_arity(step: StepFunction, names: Sequence[str], given: int | None = None) -> StepFunction:
    """Return ``step`` as a function of the arguments ``names``, of which it may accept only the first ones.

    A function that takes ``*args`` receives the first ``given`` arguments, or more if it requires more by name.

    Raises:
        LoopError: ``step`` requires more arguments than there are.
    """
    parameters = list(inspect.signature(step).parameters.values())
    takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if p.default is p.empty]
    name = getattr(step, "__name__", "the step")
    if len(needed) > len(names) or not (positional or takes_all):
        raise LoopError(
            f"{name} takes ({', '.join(p.name for p in positional)}); it is called with ({', '.join(names)})."
        )
    count = min(len(names), len(positional))
    if takes_all:
        count = max(len(names) if given is None else given, len(needed))
    return step if count == len(names) else lambda *args: step(*args[:count])


def check_closure(optimizer: Optimizer) -> None:
    """Raise for an optimizer that evaluates the loss several times per update.

    Raises:
        ConfigurationError: its ``step`` requires a closure.
    """
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} needs to evaluate the loss several times for an update. Set "
            "automatic_optimization = False and call its step(closure) in training_step."
        )


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(
    device: torch.device,
    precision: Precision,
    module: TrainModule,
    datamodule: DataModule | None,
    part: SequencePart | None = None,
) -> Callable[[Any, int], Any] | None:
    """Return a function from ``(batch, dataloader_idx)`` to the transferred batch; None if batches are unchanged.

    A hook of the DataModule has precedence over the module's hook of the same name. If the module cuts batches, they
    are cut first; ``part`` is that of this rank, None for all.
    """
    cut = cutting(module, part or SequencePart())
    before, move, after = (_overridden(name, module, datamodule) for name in _HOOKS)
    converts = precision.converts_batch
    if move is None and device.type == "cpu":
        if before is None and after is None and cut is None and not converts:
            return None
    elif move is None:
        move = _mover(device)

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if cut is not None:
            batch = cut(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, device, dataloader_idx)
        if converts:
            batch = precision.convert_batch(batch)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer


def cutting(module: TrainModule, part: SequencePart) -> Callable[[Any], Any] | None:
    """Return a function that cuts this rank's part of a batch; None if the module does not cut batches."""
    if not is_overridden("cut_sequences", module):
        return None

    def cut(batch: Any) -> Any:
        if part.size > 1:
            part.weigh_shares(partial(module.cut_sequences, batch), module.batch_weight)
        return module.cut_sequences(batch, part)

    return cut


def weighing(module: TrainModule, part: SequencePart) -> Callable[[Any], int | float | Tensor] | None:
    """Return a function that weighs this rank's part of a batch before it is cut; None for weights of 1."""
    if not is_overridden("batch_weight", module):
        return None
    if not is_overridden("cut_sequences", module):
        return module.batch_weight
    return lambda batch: module.batch_weight(module.cut_sequences(batch, part))


def _mover(device: torch.device) -> Callable[..., Any]:
    """Return the counterpart of the hook ``transfer_batch_to_device`` for modules that do not override it."""
    if device.type == "cuda":
        copy = BatchCopy(device)
        return lambda batch, device, dataloader_idx: copy(batch)
    return lambda batch, device, dataloader_idx: to_device(batch, device)


def _overridden(name: str, module: TrainModule, datamodule: DataModule | None) -> Callable[..., Any] | None:
    for owner, base in ((datamodule, DataModule), (module, TrainModule)):
        if owner is not None and overriding.is_overridden(name, owner, base):
            hook: Callable[..., Any] = getattr(owner, name)
            return hook
    return None
