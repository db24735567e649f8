"""One optimizer step: forward, backward and update over a window, with everything decided once, before the first.

The gradient rule: each loss is multiplied by ``weight / mean over ranks of the window's total weight``, and strategies
average gradients over ranks. The sum is the gradient of the weighted mean over the global batch, for windows of any
length, uneven weights and ranks without data. Nothing else divides for accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.step_output import check_loss, loss_of, outputs_for_hooks
from ..data.accumulation_window import Windows
from ..distributed.control import Agreement
from ..distributed.world import Pending
from ..parallel.strategy import StepFunction
from ..parallel.sync_batch_norm import is_collective
from ..parallel.zero_backward import zero_gradients
from ..run.overrides import StrategyOptimizer, is_overridden
from ..run.run import Run
from ..watchdog.heartbeat import LAST_BACKWARD, UPDATE
from .filler_batches import STAND_IN, StandIns
from .step_base import TrainingStep


class AutomaticStep(TrainingStep):
    """Forward, backward and update for a window, with one optimizer."""

    def __init__(
        self,
        run: Run,
        transfer: Callable[[Any], Any] | None,
        nonfinite: str,
        clipping: tuple[float | None, str],
        windows: Windows | None = None,
    ) -> None:
        super().__init__(run, transfer, nonfinite)
        module = run.module
        run.fabric.updater.settles_later = False
        self.optimizer = run.optimizers[0]
        traits = self.strategy.traits
        # Other strategies tell by what they reduce anyway.
        self.asks = self.world_size > 1 and not traits.carries_flags
        self.stand_ins = self._stand_ins(windows)
        self.forward = self.routed()
        self.backward = self.strategy.backward
        self.scaler = run.fabric.scaler
        self.weigh = module.batch_weight if is_overridden("batch_weight", module) else None
        self.before_zero_grad = run.hooks("on_before_zero_grad")
        self.zero_grad = self._zero_grad()
        self.apply = self._apply(clipping)
        self.step_schedulers = any(config.interval == "step" for config in run.schedulers)
        self.checked = False
        self.last_batch: Any = None
        self.batch_index = 0
        self._anyone: tuple[Tensor, Pending] | None = None

    def __call__(self, batches: list[Any], consumed: int) -> bool:
        """Run a window of micro-batches; return False where no rank had one. Collective."""
        progress = self.progress
        several = self.world_size > 1
        weights: Sequence[float] | None = None
        agreement: Agreement | None = None
        mean = 1.0
        fillers = 0
        self.refused = False
        first: Any = None
        if several:
            weights = self._weights(batches)
            if batches and self.batch_start:
                # What the hooks say to the first batch travels with this reduction.
                first = self.start_batch(batches[0], progress.batch_in_epoch)
            self.triggers.launch(progress.attempts, sum(weights), len(batches))
            stand_ins = self.stand_ins
            if not batches or (stand_ins is not None and (len(batches) < consumed or not stand_ins.began)):
                agreement = self.triggers.read()
                if agreement.ranks_with_data == 0:
                    self._heed()
                    return False
                mean = agreement.total_weight / self.world_size
                if stand_ins is not None:
                    fillers = self._missing(batches, agreement, consumed)
            if stand_ins is not None:
                stand_ins.begin(batches, progress.batch_in_epoch, consumed)
        elif len(batches) > 1 or self.weigh is not None:
            weights = self._weights(batches)
            mean = sum(weights)
        if not batches:
            self._without_data(fillers, mean, consumed)
            return True
        final = len(batches) - 1
        index = progress.batch_in_epoch
        self.run.in_window = True
        contributed = False
        for position, batch in enumerate(batches):
            self.phase[0] = position
            batch = self.start_batch(batch, index) if position or first is None else first
            if several or final:
                self.strategy.sync_gradients(position == final and not fillers)
            if self.refused:
                # The same passes as on other ranks, for nothing.
                output = None if self.stand_ins is None else self.forward(STAND_IN, index)
            else:
                output = self.forward(batch, index)
            loss = output if output.__class__ is Tensor else loss_of(output)
            if not self.checked and loss is not None:
                check_loss(loss)
                self.checked = True
            if position == 0:
                if several:
                    if agreement is None:
                        agreement = self.triggers.read()
                        mean = agreement.total_weight / self.world_size
                    if self.triggers.fired:
                        self.run.triggers.handle()
                self._drop_gradients()
            weight = 1.0 if weights is None else weights[position]
            if position == final:
                self.phase[0] = LAST_BACKWARD
            if loss is not None and weight:
                contributed = True
                self.note_loss(loss)
            if self.asks and position == final and not fillers:
                self._ask(contributed)
            if loss is not None and weight:
                self._backward(loss, None if weights is None else weight / mean)
            elif several:
                if loss is None:
                    # What other ranks log in a step with a loss, this one need not.
                    self.log.batches -= 1
                self._without_weight(loss, position == final and not fillers)
            if position == final:
                if several:
                    self.last_batch = batches[-1]
                    if fillers:
                        self._fill(fillers, index, contributed, begins=False)
                self._update(contributed, mean, consumed, index)
                self.run.in_window = False
            if self.refused:
                if several and position == final:
                    self._tell_of_end(batch, index)
            elif self.batch_end:
                outputs = outputs_for_hooks(output)
                for hook in self.batch_end:
                    hook(outputs, batch, index)
            index += 1
        return True

    # ---- the parts of a window ------------------------------------------------------------------------------------

    def _heed(self) -> None:
        if self.triggers.fired:
            self.run.triggers.handle()

    def _weights(self, batches: list[Any]) -> Sequence[float]:
        if self.weigh is None:
            return (1.0,) * len(batches)
        return [float(self.weigh(batch)) for batch in batches]

    def _drop_gradients(self) -> None:
        for hook in self.before_zero_grad:
            hook(self.optimizer)
        self.zero_grad()

    # ---- ranks with less data than others -------------------------------------------------------------------------

    def _missing(self, batches: list[Any], agreement: Agreement, count: int) -> int:
        """Return how many passes this rank has to add so that all ranks run the same number of them. Collective."""
        assert self.stand_ins is not None
        if not self.stand_ins.began:
            self.stand_ins.share(batches, agreement)
        return 0 if agreement.batches is not None else count - len(batches)

    def _fill(self, count: int, index: int, contributed: bool, begins: bool) -> None:
        """Run stand-ins at the end of a window, or for all of it where they begin it. Collective."""
        for position in range(count):
            final = position == count - 1
            self.strategy.sync_gradients(final)
            self.forward(STAND_IN, index)
            if begins and position == 0:
                # Where other ranks do, which run in step: after the window's first forward pass.
                self._heed()
            if final and self.asks:
                self._ask(contributed)
            self._without_weight(None, final)

    def _without_weight(self, loss: Tensor | None, final: bool) -> None:
        """Go through what ranks do together in a micro-batch that adds nothing here. Collective."""
        if self.stand_ins is not None:
            with zero_gradients(self.stand_ins.take_loss() if loss is None else loss) as zero:
                self.backward(zero)
        elif final:
            self.strategy.idle_backward()

    def _without_data(self, fillers: int, mean: float, consumed: int) -> None:
        """Take part in an update to which other ranks alone bring data. Collective.

        Callbacks hear of its end, with a loss of 0: what they do after it on other ranks, such as saving, may need all.
        """
        index = self.progress.batch_in_epoch
        self.phase[0] = LAST_BACKWARD
        self.run.in_window = True
        self._drop_gradients()
        if fillers:
            self._fill(fillers, index, contributed=False, begins=True)
        else:
            self._heed()
            self.strategy.idle_backward()
        self._update(False, mean, consumed, index)
        self.run.in_window = False
        self._tell_of_end(self.last_batch, index)

    def _tell_of_end(self, batch: Any, index: int) -> None:
        """Have callbacks hear of a step that this rank added nothing to."""
        module = self.run.module
        log = module.log_to(None)
        for hook in self.callbacks_batch_end:
            hook({"loss": torch.zeros(())}, batch, index)
        module.log_to(log)

    # ---- whether anyone had a loss --------------------------------------------------------------------------------

    def _ask(self, contributed: bool) -> None:
        """Start to tell one another, before the last backward pass of a window, which hides it. Collective."""
        losses = torch.tensor((contributed, self.guard.bad is not None), dtype=torch.float64)
        self._anyone = losses, self.run.world.control_reduce(losses)

    def _answers(self) -> tuple[bool, bool]:
        """Return whether any rank had a loss, and whether one was not finite."""
        assert self._anyone is not None
        losses, pending = self._anyone
        pending.wait()
        contributed, bad = losses.tolist()
        return contributed > 0, bad > 0

    def meet_nonfinite(self, number: float) -> None:
        """Take note of a loss that is not finite, and let it travel with the gradients where they carry flags."""
        super().meet_nonfinite(number)
        if not self.asks:
            self.strategy.mark_nonfinite()

    # ---- gradients and weights ------------------------------------------------------------------------------------

    def _backward(self, loss: Tensor, factor: float | None) -> None:
        if self.scaler is not None:
            factor = self.scaler.scale * (1.0 if factor is None else factor)
        if factor is not None and factor != 1.0:
            loss = loss * factor
        for hook in self.before_backward:
            hook(loss)
        self.backward(loss)
        for hook in self.after_backward:
            hook()

    def _update(self, contributed: bool, mean: float, consumed: int, index: int) -> None:
        self.phase[0] = UPDATE
        guard = self.guard
        if self.asks:
            contributed, bad = self._answers()
        elif self.world_size > 1:
            bad = guard.sees_losses and self.strategy.met_nonfinite()
        else:
            bad = guard.bad is not None
        if bad:
            # No word of it to the loss scale, which does not explain it.
            guard.heed_loss()
            self.run.fabric.updater.forget(self.optimizer)
        elif mean and (contributed or (self.world_size > 1 and not self.asks and self.strategy.contributed())):
            self.batch_index = index
            if self.apply():
                guard.in_a_row = 0
                self.progress.global_step += 1
                if self.averages is not None:
                    self.averages.after_step(self.progress.global_step - 1)
                if self.step_schedulers:
                    self.run.update_learning_rates("step")
        self.advance(consumed)

    # ---- decided once ---------------------------------------------------------------------------------------------

    def _stand_ins(self, windows: Windows | None) -> StandIns | None:
        """Return what fills in for batches without a loss, where ranks run their passes in step."""
        traits = self.strategy.traits
        forward = traits.lockstep_forward or any(is_collective(part) for part in self.run.module.modules())
        if self.world_size == 1 or not (forward or traits.lockstep_backward):
            return None
        return StandIns(self.run, self.transfer, windows, forward)

    def routed(self, training: bool = True) -> StepFunction:
        """Return the user's step, in the precision's context, through the strategy; with stand-ins where needed."""
        step = super().routed(training)
        return step if self.stand_ins is None else self.stand_ins.telling(step)

    def user_step(self) -> StepFunction:
        """Return the user's step, or a stand-in's where it gives no loss."""
        step = super().user_step()
        return step if self.stand_ins is None else self.stand_ins.wrap(step)

    def flush(self) -> None:
        """Wait for losses that are still being watched, and leave the module without hooks."""
        super().flush()
        if self.stand_ins is not None:
            self.stand_ins.release()

    def _zero_grad(self) -> Callable[[], None]:
        module, optimizer = self.run.module, self._optimizer_for_user()
        if is_overridden("optimizer_zero_grad", module):

            def zero_grad() -> None:
                module.optimizer_zero_grad(self.progress.epoch, self.progress.batch_in_epoch, optimizer)
                self.strategy.forget_losses()

            return zero_grad
        return partial(self.strategy.zero_grad, self.optimizer)

    def _apply(self, clipping: tuple[float | None, str]) -> Callable[[], bool]:
        module, optimizer, updater = self.run.module, self.optimizer, self.run.fabric.updater
        value, algorithm = clipping
        clips = value is not None or is_overridden("configure_gradient_clipping", module)

        def before() -> None:
            for hook in self.before_update:
                hook(optimizer)
            if clips:
                module.configure_gradient_clipping(optimizer, value, algorithm)

        step = self._user_step() if is_overridden("optimizer_step", module) else None
        prepare = before if self.before_update or clips else None
        if not updater.guarded and updater.unexplained is None and prepare is None and step is None:
            return partial(self.strategy.step, optimizer)
        return partial(updater, optimizer, prepare, step)

    def _user_step(self) -> Callable[[], bool]:
        module, optimizer = self.run.module, self._optimizer_for_user()

        def step() -> bool:
            module.optimizer_step(self.progress.epoch, self.batch_index, optimizer, lambda: self.run.latest_loss)
            return optimizer.take_applied() if isinstance(optimizer, StrategyOptimizer) else True

        return step

    def _optimizer_for_user(self) -> Any:
        """Return the optimizer that the user's own hooks of an update get."""
        if not self.strategy.traits.reduces_in_backward:
            return self.optimizer
        return StrategyOptimizer(self.optimizer, self.strategy)
