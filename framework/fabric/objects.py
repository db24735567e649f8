"""What ``Fabric.setup`` keeps of a module, and the optimizers and schedulers that it gives back, ready for many ranks.

Each behaves like the original and adds what the ranks, the precision and the accumulation window ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.loss_scaler import LossScaler
from ..parallel.optimizer_step import Updater
from ..parallel.strategy import Strategy, parameters_of
from .gradient_window import GradientWindow


class Engine:
    """One set-up module: the strategy that took it over, the updater of its optimizers, its accumulation window."""

    def __init__(self, module: nn.Module, strategy: Strategy, scaler: LossScaler | None, peers: list[Engine]) -> None:
        self.module = module
        self.peers = peers
        self.strategy = strategy
        self.updater = Updater(strategy, scaler)
        self.optimizers: list[FabricOptimizer] = []
        self.window: GradientWindow | None = None
        self._idle_at: tuple[GradientWindow, int] | None = None

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of the module's."""
        return any(parameter is own for own in self.module.parameters())

    def carry_scale(self, factor: float, stepped: Optimizer) -> None:
        """Follow a change of the loss scale in all gradients that were computed before it and are yet to be used.

        An optimizer that steps between another's backward and step changes the scale under it; a power of two is exact.
        """
        for engine in self.peers:
            for other in engine.optimizers:
                if other.optimizer is not stepped and engine.updater.holds_scaled(other.optimizer):
                    engine.strategy.scale_gradients(parameters_of(other.optimizer), factor)

    def take_part(self) -> None:
        """Join the reduction that ends a window, where this rank has called no backward for it. Collective."""
        window = self.window
        if window is None or not window.waits_for_loss or self._idle_at == (window, window.steps):
            return
        self._idle_at = (window, window.steps)
        self.strategy.zero_backward()


class FabricOptimizer:
    """A set-up optimizer. Inside ``accumulate`` it acts at the end of a window only.

    For ``isinstance`` it is of the original's class, and all else is the original's.

    Attributes:
        optimizer: The original.
        applied: How many updates were applied.
        step_was_skipped: Whether the last update was left out because gradients were not finite or no rank had a loss.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self.applied = 0
        self.step_was_skipped = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What ``isinstance`` sees, beside the true class."""
        return type(self.__dict__["optimizer"]) if "optimizer" in self.__dict__ else FabricOptimizer

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("param_groups", "state", "defaults"):
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Fabric{self.optimizer!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply an update, inside ``accumulate`` at the end of a window; return what a closure does. Collective."""
        if self.waits:
            return None
        optimizer, strategy = self.optimizer, self.engine.strategy
        result: Any = None

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
        """Drop gradients, unless they wait for the end of an accumulation window."""
        window = self.engine.window
        if window is not None and window.keeps(id(self)):
            return
        if set_to_none:
            self.engine.strategy.zero_grad(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=False)

    @property
    def waits(self) -> bool:
        """Whether gradients are still being accumulated."""
        return self.engine.window is not None and not self.engine.window.sync

    def prepare(self) -> bool:
        """Make gradients those of the weighted mean, once a window; return whether there is an update. Collective."""
        window = self.engine.window
        if window is None:
            return True
        self.engine.take_part()
        factor = window.settle(id(self))
        if factor is not None and factor not in (0.0, 1.0):
            self.engine.strategy.scale_gradients(parameters_of(self.optimizer), factor)
        return not window.is_empty


class FabricScheduler:
    """A set-up scheduler; all that is not its own is the original's.

    Attributes:
        scheduler: The original.
    """

    def __init__(self, scheduler: Any, optimizers: list[FabricOptimizer], with_optimizer: bool) -> None:
        self.scheduler = scheduler
        self._optimizers = optimizers
        self._with_optimizer = with_optimizer
        self._seen = self._applied()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What ``isinstance`` sees, beside the true class."""
        return type(self.__dict__["scheduler"]) if "scheduler" in self.__dict__ else FabricScheduler

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["scheduler"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if an update was applied since the last time; so it is safe to call after every micro-batch."""
        if self._with_optimizer:
            now = self._applied()
            if now == self._seen:
                return
            self._seen = now
        self.scheduler.step(*args, **kwargs)

    def catch_up(self) -> None:
        """Take the updates so far as stepped for: the schedule of a checkpoint is put back with its counts."""
        self._seen = self._applied()

    def _applied(self) -> list[int]:
        return [optimizer.applied for optimizer in self._optimizers]
