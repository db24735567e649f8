"""Manual optimization: the user's ``training_step`` calls backward and the optimizers itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import ConfigurationError
from ..core.optimizer_config import parameters_of
from ..data.accumulation_window import MicroBatches
from ..diagnostics.nonfinite_guard import NonFiniteGuard
from ..parallel.closures import evaluate_once
from ..parallel.strategy import StepFunction, Traits
from ..parallel.zero_backward import zero_loss
from ..run.overrides import is_overridden
from ..run.run import Run
from .step_base import TrainingStep

# A program may train some of its models in every n-th batch only: the FLOPs are those of an average over these batches,
# a multiple of the usual n.
_COUNTED_BATCHES = 20
_BACKWARD_ARGUMENTS = ("gradient", "retain_graph", "create_graph", "inputs")


class ManualOptimizer:
    """An optimizer as returned by ``self.optimizers()``, whose ``step`` reduces and unscales gradients.

    All other attributes are those of the wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer, run: Run, guard: NonFiniteGuard, applied: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self._guard = guard
        self._run = run
        self._applied = applied
        traits = run.traits
        self._reduced_before = traits.reduces_in_backward
        self._closes = closes_windows(traits)
        self._reduces = self._closes or (run.world.size > 1 and not self._reduced_before)
        self.reduced = False
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
            loss = closure()
            self.reduced = False
            self.reduce()
            # The optimizer may decide by the loss how often to evaluate, so all ranks must see the same value:
            # otherwise they would call different numbers of collectives.
            return self._run.world.all_reduce(loss.detach().clone(), "mean") if isinstance(loss, Tensor) else loss

        if closure is None:
            self.reduce()
        elif fabric.updater.guarded:
            raise ConfigurationError(
                "step(closure) computes its gradients inside the update, so they cannot be unscaled or checked "
                "before it: call step() without closure, or use another precision and nonfinite='raise'."
            )
        hooks = partial(self._call_hooks, optimizer) if self._hooks else None
        # Collective, also on ranks with finite losses: a rank that decided alone would diverge from the others.
        if self._guard.agree():
            self._guard.handle_loss()
            fabric.updater.forget(optimizer)
        else:
            with self._uncounted(closure):
                if fabric.updater(optimizer, hooks, apply, blind=closure is not None):
                    self._guard.applied()
                    self._applied()
        self.reduced = False
        return result

    def _uncounted(self, closure: Any) -> AbstractContextManager[None]:
        """Return a context that leaves the update out of the model FLOPs, but not the passes of a closure."""
        count = self._run.meter.flop_count
        return nullcontext() if count is None or closure is not None else count.paused()

    def gradients_added(self) -> None:
        """Mark gradients as not reduced, after a backward pass has added local gradients.

        Averaging gradients a second time does not change the part that was averaged before.
        """
        self.reduced = False

    def reduce(self) -> None:
        """Average the gradients over ranks, once per update: before it, or before they are clipped. Collective."""
        if self._reduces and not self.reduced:
            strategy, parameters = self._run.strategy, parameters_of(self.optimizer)
            if self._closes:
                strategy.sync_gradients(True)
                strategy.backward(zero_loss(parameters))
            else:
                strategy.reduce_gradients(parameters)
            self.reduced = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        if self._reduced_before:
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

    Under manual optimization the last pass is unknown until the optimizer steps. If every rank holds full weights
    between passes, one more backward pass with gradients of zero, started from the weights, closes the window.
    """
    return traits.reduces_in_backward and not traits.forward_has_collectives


class ManualStep(TrainingStep):
    """Calls ``training_step`` for each batch; a batch in which any optimizer stepped counts as one optimizer step."""

    def __init__(self, run: Run, transfer: Callable[[Any], Any] | None, nonfinite: str) -> None:
        super().__init__(run, transfer, nonfinite)
        self.reduced_before = self.strategy.traits.reduces_in_backward
        self.closes = closes_windows(self.strategy.traits)
        # With other strategies gradients are reduced when an optimizer steps, which may happen several times in a
        # training step. The strategy's own forward and backward would reduce after every backward pass, so they are
        # bypassed.
        self.counted_windows = _COUNTED_BATCHES
        self.forward = self.routed()
        module = run.module
        self.batch_weight = self.meter.adding(module.batch_weight) if self.meter.unit == "tokens" else None
        self.own_backward = module.backward if is_overridden("backward", module) else Tensor.backward
        self.stepped = False
        self.manual_optimizers = [ManualOptimizer(each, run, self.guard, self._note) for each in run.optimizers]
        run.use_manual(self.manual_optimizers, self.manual_backward)
        self.updater = run.updater
        self.updater.defer_scale(True)

    def routed(self, training: bool = True) -> StepFunction:
        """Return the user's step, through the strategy's own forward if that reduces in the backward pass."""
        return super().routed(training and self.reduced_before)

    def _note(self) -> None:
        self.stepped = True

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss, scaled if the precision uses loss scaling."""
        scaler = self.run.scaler
        self.note_loss(loss)
        for hook in self.before_backward:
            hook(loss)
        # Any optimizer may hold parameters of this loss, so all of them must reduce again before their next update.
        for optimizer in self.manual_optimizers:
            optimizer.gradients_added()
        scaled = loss if scaler is None else loss * scaler.scale
        if self.closes:
            # Only accumulate: it is not known here whether another backward pass follows before the update.
            self.strategy.sync_gradients(False)
        if self.reduced_before:
            options = {**dict(zip(_BACKWARD_ARGUMENTS, args, strict=False)), **kwargs}
            self.strategy.backward(scaled, **{name: value for name, value in options.items() if value is not None})
        else:
            self.own_backward(scaled, *args, **kwargs)
        for hook in self.after_backward:
            hook()

    def __call__(self, batches: MicroBatches, consumed: int, samples: Sequence[float] | None = None) -> bool:
        """Run a batch; return False if no rank had one. Collective."""
        index = self.progress.batch_in_epoch
        self.epoch_skipped = False
        if self.batch_weight is not None:
            for batch in batches:
                # Before the transfer: a number on a device would be waited for.
                self.batch_weight(batch)
        batches = [self.start_batch(batch, index) for batch in batches]
        if self.is_distributed:
            used = 0 if self.epoch_skipped else len(batches)
            self.triggers.launch(self.progress.attempts, float(used), used)
            agreement = self.triggers.read()
            if self.triggers.fired:
                self.run.triggers.handle()
            # Optimizers call collectives in the user's step, which all ranks must run: batches that only some ranks
            # have are dropped.
            if agreement.ranks_with_data < self.run.world.size:
                return False
        elif self.epoch_skipped:
            return False
        for batch in batches:
            self.stepped = False
            output = self.forward(batch, index)
            self.updater.finish()
            if self.stepped:
                self.progress.updated()
            self.advance(consumed)
            if self.stepped and self.averages is not None:
                self.averages.after_step(self.progress.global_step - 1)
            for hook in self.batch_end:
                hook(output, batch, index)
        return True
