"""One update of the weights: unscale, check that gradients are finite, clip, step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import ConfigurationError, unknown
from ..core.optimizer_config import parameters_of
from ..core.precision import LossScaler
from ..core.split_optimizer import needs_closure
from .strategy import Strategy

CLIP_ALGORITHMS = ("norm", "value")
_LEAST_SCALE = 1.0


class Updater:
    """Applies updates for one strategy and one loss scaler.

    Args:
        strategy: applies the update.
        scaler: unscales gradients and adapts the scale; None without a loss scale.
    """

    def __init__(self, strategy: Strategy, scaler: LossScaler | None) -> None:
        self.strategy = strategy
        self.scaler = scaler
        self.guarded = scaler is not None
        """Whether to skip an update whose gradients are not finite. The check gives the same result on all ranks."""
        self.on_nonfinite_gradients: Callable[[Optimizer], None] | None = None
        """Called on all ranks if gradients are not finite and the loss scale is not the cause. May raise."""
        self.defers_scale = False
        """Whether ``finish`` adapts the loss scale, instead of each update. Several optimizers share one scale, which
        may change only when none of them holds scaled gradients."""
        self._unscaled: set[int] = set()
        self._outcomes: list[bool] = []

    def guard(self, skip_nonfinite: bool, on_nonfinite_gradients: Callable[[Optimizer], None] | None) -> None:
        """Set the handling of non-finite gradients: see the attributes. With a scaler updates are always guarded."""
        self.guarded = skip_nonfinite or self.scaler is not None
        self.on_nonfinite_gradients = on_nonfinite_gradients

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, once for each update."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self.strategy.gradients.scale(parameters_of(optimizer), 1.0 / self.scaler.scale)
            self._unscaled.add(id(optimizer))

    def _unscale_and_check(self, optimizer: Optimizer) -> bool:
        """Unscale gradients unless that has been done; return whether they are finite. Collective."""
        parameters, gradients = parameters_of(optimizer), self.strategy.gradients
        if self.scaler is None or id(optimizer) in self._unscaled:
            return gradients.are_finite(parameters)
        self._unscaled.add(id(optimizer))
        return gradients.scale_and_check(parameters, 1.0 / self.scaler.scale)

    def forget(self, optimizer: Optimizer) -> None:
        """Record that the gradients of an optimizer were dropped."""
        self._unscaled.discard(id(optimizer))

    def discard(self, optimizer: Optimizer) -> None:
        """Record that gradients that are not finite will not be used. Called on all ranks."""
        self.strategy.gradients.discard()
        self.forget(optimizer)

    def finish(self) -> None:
        """Adapt the scale to all updates since the last call, if ``defers_scale`` is set."""
        if self.scaler is not None and self._outcomes:
            self.scaler.update(all(self._outcomes))
        self._outcomes.clear()

    def holds_scaled(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of an optimizer, if any, are still multiplied by the loss scale."""
        return self.scaler is not None and id(optimizer) not in self._unscaled

    def clip(self, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        """Clip an optimizer's gradients. Collective.

        Returns:
            The norm before clipping, a 0-d tensor, when clipping by norm; else None.
        """
        parameters, gradients = parameters_of(optimizer), self.strategy.gradients
        self.unscale(optimizer)
        if algorithm == "value":
            gradients.clip_by_value(parameters, value)
            return None
        norm = gradients.norm(parameters)
        gradients.clip_by_norm(parameters, value, norm)
        return norm

    def bound(
        self, optimizer: Optimizer, hooks_and_clip: Callable[[], Any] | None, step: Callable[[], bool] | None
    ) -> Callable[[], bool]:
        """Return a function that calls this updater with these arguments, specialized for its settings."""
        if self.scaler is not None:
            return partial(self, optimizer, hooks_and_clip, step)
        strategy = self.strategy
        steps_itself = step is None and type(strategy).step is Strategy.step
        apply = partial(strategy.step, optimizer) if step is None else step
        checks = self.guarded or self.on_nonfinite_gradients is not None

        def update() -> bool:
            if checks:
                groups = optimizer.param_groups
                parameters = groups[0]["params"] if len(groups) == 1 else parameters_of(optimizer)
                # The operations may be replaced when parameters are frozen.
                if not strategy.gradients.are_finite(parameters):
                    self._skip_update(optimizer)
                    return False
            if hooks_and_clip is not None:
                hooks_and_clip()
            if steps_itself:
                # Looked up in each update: schedulers of torch, and saves that copy state, replace it.
                optimizer.step()
                return True
            return apply()

        return update

    def __call__(
        self,
        optimizer: Optimizer,
        hooks_and_clip: Callable[[], Any] | None = None,
        step: Callable[[], bool] | None = None,
        blind: bool = False,
    ) -> bool:
        """Update the weights; return whether the update was applied. Collective.

        Args:
            optimizer: holds the parameters to update.
            hooks_and_clip: called with unscaled gradients, after they were checked.
            step: applies the update instead of the strategy.
            blind: the gradients are computed inside ``step``, so they cannot be checked before it.
        """
        strategy = self.strategy
        checks = self.guarded or (self.on_nonfinite_gradients is not None and not blind)
        # Before clipping, which would hide an infinity by clamping it.
        if checks and not self._unscale_and_check(optimizer):
            self._skip_update(optimizer)
            return False
        if hooks_and_clip is not None:
            hooks_and_clip()
        applied = strategy.step(optimizer) if step is None else step()
        if checks and self.scaler is not None:
            self._record(optimizer, True)
        return applied

    def _skip_update(self, optimizer: Optimizer) -> None:
        # A scale below 1 reduces the loss, so the scale cannot have caused the overflow.
        explained = self.scaler is not None and self.scaler.scale > _LEAST_SCALE
        if self.on_nonfinite_gradients is not None and not explained:
            self.on_nonfinite_gradients(optimizer)
        self.strategy.gradients.discard()
        self._record(optimizer, False)

    def _record(self, optimizer: Optimizer, finite: bool) -> None:
        """Record an update for the loss scale, which grows after finite ones and shrinks after others."""
        self.forget(optimizer)
        self._outcomes.append(finite)
        if not self.defers_scale:
            self.finish()


def check_clipping(value: float | None, algorithm: str | None) -> tuple[float | None, str]:
    """Check a clip value and the name of an algorithm; 0 and None mean no clipping.

    Raises:
        UnknownNameError: the algorithm is not known.
        ConfigurationError: the value is not a number of at least 0.
    """
    name = algorithm or "norm"
    if name not in CLIP_ALGORITHMS:
        raise unknown("gradient_clip_algorithm", str(name), CLIP_ALGORITHMS)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise ConfigurationError(
            f"gradient_clip_val={value!r} must be a number of at least 0; None or 0 does not clip."
        )
    return (float(value) if value else None), name


def evaluate_once(optimizer: Optimizer, closure: Callable[[], Any], strategy: str) -> Any:
    """Run a closure before the update, for an optimizer that evaluates the loss once; return its result.

    Args:
        optimizer: the optimizer that was given the closure.
        closure: computes the loss and its gradients.
        strategy: the name of the strategy, for the error.

    Raises:
        ConfigurationError: the optimizer evaluates the loss several times and changes the weights in between.
    """
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the loss several times for an update, and changes full weights in "
            f"between, which strategy={strategy!r} splits over ranks and a loss scale does not allow: use another "
            "optimizer, or strategy='ddp' without fp16."
        )
    with torch.enable_grad():
        return closure()
