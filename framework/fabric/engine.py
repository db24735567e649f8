"""``Engine``, the record of a set-up module, and the optimizers and schedulers that a Fabric returns.

Optimizers and schedulers behave like the originals, and follow accumulation windows and the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.optimizer_config import parameters_of
from ..core.precision import LossScaler
from ..core.proxy import Proxy
from ..core.split_optimizer import needs_closure
from ..parallel.compilation import Compilation
from ..parallel.generation import route_generation
from ..parallel.optimizer_step import Updater, evaluate_once
from ..parallel.strategy import Strategy
from .gradient_window import GradientWindow


class Engine:
    """A module that was set up: its strategy, the updater of its optimizers and its accumulation window.

    Attributes:
        module: The user's own module.
        is_trained_elsewhere: Whether an optimizer of another engine updates parameters of this module too.
        peers: The engines of all modules that share the loss scaler, this one included.
        strategy: The clone that took over the module.
        window: The accumulation window that the module is in, None outside ``accumulate``.
        runs_window: Whether the strategy runs the passes of a window, in which the module may be called.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, scaler: LossScaler | None, peers: list[Engine]) -> None:
        self.module = module
        self.peers = peers
        self.strategy = strategy
        self.updater = Updater(strategy, scaler)
        self.optimizers: list[FabricOptimizer] = []
        self.is_trained_elsewhere = False
        self.window: GradientWindow | None = None
        self._joined: tuple[GradientWindow, int] | None = None
        self._may_sync = True
        self.runs_window = False
        # Functions that revert changes to the module.
        self._at_release = ExitStack()

    def compile(self, compilation: Compilation) -> None:
        """Compile the module's parts, until ``release``."""
        self._at_release.callback(compilation.apply(self.module, self.strategy))

    def route_generation(self, context: AbstractContextManager[Any] | None) -> None:
        """Run ``generate`` of models of transformers through the strategy, until ``release``."""
        self._at_release.callback(route_generation(self.module, self.strategy, context))

    def release(self) -> None:
        """Release the module from the strategy, and revert ``compile`` and ``route_generation``."""
        self.strategy.teardown()
        self._at_release.close()

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates the module."""
        return bool(self.optimizers) or self.is_trained_elsewhere

    @property
    def updates(self) -> int:
        """The number of updates that the module's optimizers have applied; the same on all ranks."""
        return sum(one.applied for engine in self.peers for one in engine.optimizers if self in one.engines)

    def owns(self, parameter: Tensor) -> bool:
        """Return whether a parameter belongs to the module."""
        return any(parameter is own for own in self.module.parameters())

    def carry_scale(self, factor: float, stepped: Optimizer) -> None:
        """Multiply gradients that other optimizers have not used yet by the change of the loss scale.

        An optimizer that steps between another's backward and step changes the scale that the other will divide by.
        The factor is a power of two with the default settings of ``LossScaler``; then no digit is lost.
        """
        for engine in self.peers:
            for other in engine.optimizers:
                if other.optimizer is not stepped and engine.updater.holds_scaled(other.optimizer):
                    engine.strategy.gradients.scale(parameters_of(other.optimizer), factor)

    def begin_micro_batch(self, window: GradientWindow) -> None:
        """Enter a window, and reduce gradients over ranks only if the micro-batch ends it."""
        self.window = window
        self.strategy.sync_gradients(window.sync and self._may_sync)

    def end_micro_batch(self) -> None:
        """Reduce gradients again in every backward pass. The window stays until the next pass outside it."""
        self.strategy.sync_gradients(self._may_sync)

    def allow_sync(self, allowed: bool) -> bool:
        """Allow the reduction of gradients, where a window does not postpone it, or not; return what was set before."""
        before, self._may_sync = self._may_sync, allowed
        postponed = self.window is not None and self.window.inside and not self.window.sync
        self.strategy.sync_gradients(allowed and not postponed)
        return before

    @contextmanager
    def running_window(self) -> Generator[None, None, None]:
        """Let the strategy run the passes of a window inside."""
        self.runs_window = True
        try:
            yield
        finally:
            self.runs_window = False

    @contextmanager
    def without_sync(self) -> Generator[None, None, None]:
        """Do not reduce gradients in the passes inside."""
        before = self.allow_sync(False)
        try:
            yield
        finally:
            self.allow_sync(before)

    def leave_closed_window(self) -> None:
        """Leave a window whose last micro-batch has ended, so that optimizers act in every step again."""
        if self.window is not None and self.window.is_closed:
            self.window = None

    def join_reduction(self) -> None:
        """Join the reduction that ends a window if this rank has called no backward for it. Collective."""
        window = self.window
        if window is None or not window.lacks_backward or self._joined == (window, window.steps):
            return
        # Several optimizers of the module call this: one pass serves them all.
        self._joined = (window, window.steps)
        self.strategy.zero_backward()


class FabricOptimizer(Proxy):
    """A set-up optimizer. Inside ``accumulate`` it acts at the end of a window only.

    Attributes:
        optimizer: The original.
        engine: The engine of the first module that it updates.
        engines: Those of all modules that it updates.
        applied: The number of updates that were applied.
        step_was_skipped: Whether the last update was skipped, because gradients were not finite or no rank had a loss.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        super().__init__(optimizer)
        self.optimizer = optimizer
        self.engine = engine
        self.engines = [engine]
        self.applied = 0
        self.step_was_skipped = False

    def add_engine(self, engine: Engine) -> None:
        """Record that the optimizer updates another module, too."""
        if engine not in self.engines:
            self.engines.append(engine)
            engine.is_trained_elsewhere = True

    def __setattr__(self, name: str, value: Any) -> None:
        # What the original reads in its step must be set there.
        if name in ("param_groups", "state", "defaults"):
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Fabric{self.optimizer!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply an update, inside ``accumulate`` at the end of a window only. Collective.

        Args:
            closure: computes the loss and its gradients. It is called in every micro-batch, unless the optimizer
                evaluates it several times for an update.

        Returns:
            What the closure returned; None without one or where it was not called.

        Raises:
            ConfigurationError: the optimizer evaluates the closure several times, and the strategy shards weights or
                losses are scaled.
        """
        optimizer, strategy = self.optimizer, self.engine.strategy
        result: Any = None
        if closure is not None and self._evaluates_first:
            result, closure = evaluate_once(optimizer, closure, strategy.name), None
        if self.waits:
            return result

        def apply() -> bool:
            nonlocal result
            if closure is None:
                return strategy.step(optimizer)
            result = optimizer.step(closure)
            return True

        scaler = self.engine.updater.scaler
        scale = 1.0 if scaler is None else scaler.scale
        applied = self.prepare() and self.engine.updater(optimizer, None, apply)
        if scaler is not None and scaler.scale != scale:
            self.engine.carry_scale(scaler.scale / scale, optimizer)
        self.step_was_skipped = not applied
        self.applied += applied
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, unless they are needed at the end of an accumulation window."""
        window = self.engine.window
        if window is not None and window.retains(id(self)):
            return
        if set_to_none:
            self.engine.strategy.zero_grad(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=False)

    @property
    def _evaluates_first(self) -> bool:
        """Whether a closure runs before the update: its gradients are scaled, unscaled or applied outside the original.

        An original that never steps would not call it at all.
        """
        engine = self.engine
        own = engine.strategy.traits.reduces_in_backward or engine.updater.scaler is not None
        return own or (engine.window is not None and not needs_closure(self.optimizer))

    @property
    def waits(self) -> bool:
        """Whether gradients are still being accumulated."""
        return self.engine.window is not None and self.engine.window.waits()

    def prepare(self) -> bool:
        """Scale gradients to those of the weighted mean, once for each window. Collective.

        Returns:
            Whether there is an update: False if no rank had a loss.
        """
        window = self.engine.window
        if window is None:
            return True
        for engine in self.engines:
            engine.join_reduction()
        factor = window.take_factor(id(self))
        if factor is not None and factor not in (0.0, 1.0):
            self.engine.strategy.gradients.scale(parameters_of(self.optimizer), factor)
        return not window.is_empty


class FabricScheduler(Proxy):
    """A set-up scheduler.

    Attributes:
        scheduler: The original.
    """

    def __init__(
        self, scheduler: Any, optimizers: list[FabricOptimizer], with_optimizer: bool, steps_per_update: int = 1
    ) -> None:
        super().__init__(scheduler)
        self.scheduler = scheduler
        self._steps = steps_per_update
        self._optimizers = optimizers
        self._with_optimizer = with_optimizer
        self._seen = self._applied()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if an update was applied since the last call, so that it can be called after every micro-batch."""
        if self._with_optimizer:
            now = self._applied()
            if now == self._seen:
                return
            self._seen = now
        for _ in range(self._steps):
            # A scheduler with a fixed length raises an error beyond it.
            if self._steps == 1 or self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)

    def catch_up(self) -> None:
        """Count the updates so far as stepped for. Called after loading, when the scheduler's own state is restored."""
        self._seen = self._applied()

    def _applied(self) -> list[int]:
        return [optimizer.applied for optimizer in self._optimizers]
