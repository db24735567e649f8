"""The update of automatic optimization with the user's hooks, resolved once per fit.

Hooks that are not overridden cost nothing: without hooks the strategy updates, and the updater clips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ..api import overriding
from ..core.optimizer_config import drop_gradients
from ..core.proxy import Proxy
from ..parallel.strategy import Strategy
from ..run.overrides import StrategyOptimizer, is_overridden
from ..run.run import Run


class _HookOptimizer(Proxy):
    """An optimizer as the module's hooks get it: ``optimizer`` is the original, as in Lightning."""

    @property
    def optimizer(self) -> Optimizer:
        """The original."""
        original: Optimizer = self.__dict__["_original"]
        return original


class UserUpdate:
    """Binds ``zero_grad`` and ``apply`` to the shortest code path that the module's overridden hooks allow.

    Args:
        run: the fit.
        hooks: the hooks ``on_before_optimizer_step``, called with the optimizer on unscaled gradients.
        clipping: the Trainer's clip value, None for no clipping, and algorithm.
        around: calls the function that updates the weights, and returns its result; None to call it directly.
    """

    zero_grad: Callable[[], None]
    """Drops the gradients of the previous update."""
    apply: Callable[[], bool]
    """Applies the update; returns whether it was applied. Collective."""
    index: int = 0
    """The index of the last batch before the update, which ``optimizer_step`` of the module is given."""

    def __init__(
        self,
        run: Run,
        hooks: Sequence[Callable[..., Any]],
        clipping: tuple[float | None, str],
        around: Callable[[Callable[[], bool]], bool] | None = None,
    ) -> None:
        self._run = run
        self._module = run.module
        self._strategy = run.strategy
        self._updater = run.updater
        self._optimizer = run.optimizers[0]
        self._around = around
        # Some strategies hold gradients or weights outside of the parameters, so the strategy must do the step and drop
        # the gradients.
        reduces = self._strategy.traits.reduces_in_backward
        self._for_user: Any = (
            StrategyOptimizer(self._optimizer, self._strategy) if reduces else _HookOptimizer(self._optimizer)
        )
        self.zero_grad = self._zero_grad()
        self.apply = self._apply(self._hooks_and_clip(hooks, clipping))

    def _zero_grad(self) -> Callable[[], None]:
        if not is_overridden("optimizer_zero_grad", self._module):
            if not overriding.is_overridden("zero_grad", self._strategy, Strategy):
                return partial(drop_gradients, self._optimizer)
            return partial(self._strategy.zero_grad, self._optimizer)
        module, progress, optimizer = self._module, self._run.progress, self._for_user
        return lambda: module.optimizer_zero_grad(progress.epoch, progress.batch_in_epoch, optimizer)

    def _hooks_and_clip(
        self, hooks: Sequence[Callable[..., Any]], clipping: tuple[float | None, str]
    ) -> Callable[[], Any] | None:
        """Return a function that runs hooks and clipping after unscaling; None if there are none."""
        clip = self._clip(*clipping)
        if not hooks:
            return clip
        optimizer = self._optimizer

        def hooks_and_clip() -> None:
            for hook in hooks:
                hook(optimizer)
            if clip is not None:
                clip()

        return hooks_and_clip

    def _clip(self, value: float | None, algorithm: str) -> Callable[[], Any] | None:
        module, optimizer = self._module, self._optimizer
        if is_overridden("configure_gradient_clipping", module) or (
            value is not None and is_overridden("clip_gradients", module)
        ):
            return partial(module.configure_gradient_clipping, optimizer, value, algorithm)
        return None if not value else partial(self._updater.clip, optimizer, value, algorithm)

    def _apply(self, hooks_and_clip: Callable[[], Any] | None) -> Callable[[], bool]:
        step = self._user_step() if is_overridden("optimizer_step", self._module) else None
        if self._around is not None:
            step = partial(self._around, step or partial(self._strategy.step, self._optimizer))
        return self._updater.bound(self._optimizer, hooks_and_clip, step)

    def _user_step(self) -> Callable[[], bool]:
        run, module, optimizer = self._run, self._module, self._for_user

        def step() -> bool:
            module.optimizer_step(run.progress.epoch, self.index, optimizer, lambda: run.latest_loss)
            return optimizer.take_applied() if isinstance(optimizer, StrategyOptimizer) else True

        return step
