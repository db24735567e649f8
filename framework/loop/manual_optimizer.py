"""The optimizers that the user's step gets under manual optimization, and the averages of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from ..core.errors import ConfigurationError
from ..core.optimizer_config import parameters_of
from ..diagnostics.nonfinite_guard import NonFiniteGuard
from ..parallel.optimizer_step import evaluate_once
from ..parallel.strategy import Traits
from ..run.run import Run


class BackwardAverage:
    """Averages all gradients at the end of a backward pass, for a strategy whose own passes do not communicate.

    ``parameter.grad`` is then that of the global batch wherever the user's code reads, clips or changes it. A pass that
    is run by ``loss.backward()`` or ``torch.autograd.backward`` is averaged as one of ``manual_backward``. Averaging a
    second time does not change the part of a gradient that was averaged before.

    Args:
        run: the fit.
        averaged: called when the gradients have been averaged.
    """

    def __init__(self, run: Run, averaged: Callable[[], None]) -> None:
        self._run = run
        self._averaged = averaged
        self._handles: dict[Tensor, Any] = {}
        self._parameters: list[Tensor] = []
        self._is_queued = False
        self.passes = 0
        """The number of backward passes that were averaged."""
        run.at_end.callback(self._remove)

    def refresh(self) -> None:
        """Watch the parameters that are trained now."""
        found: dict[Tensor, None] = dict.fromkeys(self._run.module.parameters())
        found |= dict.fromkeys(each for optimizer in self._run.optimizers for each in parameters_of(optimizer))
        self._parameters = list(found)
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._meet)

    def begin(self) -> None:
        """Begin a batch: a backward pass that failed has left its average out."""
        self._is_queued = False

    def _meet(self, parameter: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            # torch calls it when the pass has computed all gradients, as it does for DistributedDataParallel. Private:
            # `register_multi_grad_hook` calls before the last of them is in `parameter.grad`.
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._is_queued = False
        self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients of all parameters that require one now. Collective."""
        self._run.strategy.reduce_gradients([each for each in self._parameters if each.requires_grad])
        self.passes += 1
        self._averaged()

    def _remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}


class ManualOptimizer:
    """An optimizer as returned by ``self.optimizers()``, whose ``step`` reduces and unscales gradients.

    All other attributes are those of the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        run: Run,
        guard: NonFiniteGuard,
        average: BackwardAverage | None,
        applied: Callable[[], None],
        check_weighed: Callable[[], None],
        weigh: Callable[[Tensor], Tensor],
    ) -> None:
        self.optimizer = optimizer
        self._guard = guard
        self._run = run
        self._average = average
        self._applied = applied
        self._check_weighed = check_weighed
        self._weigh = weigh
        self._reduced_before = run.traits.reduces_in_backward
        self._closes = closes_windows(run.traits)
        self.reduced = False
        """Whether the gradients are those of all ranks. A backward pass changes it."""
        self._is_checked = False
        self._hooks = run.hooks("on_before_optimizer_step")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over ranks and apply an update. Collective. Returns what the optimizer's step does."""
        optimizer, fabric = self.optimizer, self._run.fabric
        result: Any = None
        if closure is not None and self._reduced_before:
            result, closure = evaluate_once(optimizer, closure, fabric.strategy.name), None

        def apply() -> bool:
            nonlocal result
            if closure is None:
                return fabric.strategy.step(optimizer)
            result = optimizer.step(evaluate)
            return True

        def evaluate() -> Any:
            assert closure is not None
            self.reduced = False
            loss = closure()
            self.reduce()
            # The optimizer may decide by the loss how often to evaluate, so all ranks must see the same value:
            # otherwise they would call different numbers of collectives.
            return self._run.world.all_reduce(self._weigh(loss), "mean") if isinstance(loss, Tensor) else loss

        if closure is None:
            if not self._is_checked:
                self._check_gradients()
            if self._reduced_before:
                # Otherwise each backward pass is checked as it is averaged: gradients may be those of earlier batches.
                self._check_weighed()
            self.reduce()
        elif fabric.updater.guarded:
            raise ConfigurationError(
                "step(closure) computes its gradients inside the update, so they cannot be unscaled or checked "
                "before it: call step() without closure, or use another precision and nonfinite='raise'."
            )
        hooks = partial(self._call_hooks, optimizer) if self._hooks else None
        # Collective, also on ranks with finite losses: a rank that decided alone would diverge from the others.
        if self._guard.is_any_loss_bad():
            self._guard.handle_loss()
            fabric.updater.forget(optimizer)
        else:
            with self._uncounted(closure):
                if fabric.updater(optimizer, hooks, apply, blind=closure is not None):
                    self._guard.in_a_row = 0
                    self._applied()
        self.reduced = False
        return result

    def _uncounted(self, closure: Any) -> AbstractContextManager[None]:
        """Return a context that leaves the update out of the model FLOPs, but not the passes of a closure."""
        count = self._run.meter.flop_count
        return nullcontext() if count is None or closure is not None else count.paused()

    def _check_gradients(self) -> None:
        """Report an update without any gradient, at the first update."""
        self._is_checked = True
        # An engine that takes one optimizer holds the gradients itself.
        if self._run.traits.takes_one_optimizer or any(each.grad is not None for each in parameters_of(self.optimizer)):
            return
        self._run.note(
            f"{type(self.optimizer).__name__}.step() was called, but none of its parameters has a gradient, so the "
            "weights stay as they are: call self.manual_backward(loss) before it, and zero_grad() not in between."
        )

    def reduce(self) -> None:
        """Average the gradients over ranks before they are used, unless the backward pass has done so. Collective."""
        if self.reduced:
            return
        if self._closes:
            self._run.strategy.sync_gradients(True)
            self._run.strategy.reduce_gradients(parameters_of(self.optimizer))
            self.reduced = True
        elif self._average is not None:
            # This rank has run no backward pass for this update; others may have, which are waiting for it.
            self._average.reduce()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, or set them to zero."""
        if self._reduced_before and set_to_none:
            self._run.strategy.zero_grad(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self._run.updater.forget(self.optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Generator[None, None, None]:
        """Make only this optimizer's parameters require gradients."""
        with self._run.module.toggled_optimizer(self.optimizer):
            yield

    def _call_hooks(self, optimizer: Optimizer) -> None:
        for hook in self._hooks:
            hook(optimizer)


def closes_windows(traits: Traits) -> bool:
    """Whether the strategy must know which backward pass is the last one of an update.

    Under manual optimization the last pass is unknown until the optimizer steps. ``reduce_gradients`` ends the window.
    """
    return traits.reduces_in_backward and not traits.forward_has_collectives
