"""One optimizer step under automatic optimization. All dispatch is resolved in ``__init__``.

A step is a window of micro-batches, always in these phases. Those with [R] are left out on one rank, which has nothing
to exchange.

    fetch the first micro-batch                                                        ``Windows.take``
    [R] with hooks ``on_train_batch_start``: start the first batch, see ``__init__``   ``start_micro_batch``
    [R] start the control reduction: weight of the window over all ranks, signals      ``ReducedTotals.open``
    for each micro-batch, in the order and by the gradient rule of ``Passes.run``:
        fetch the next one, unless all were fetched before                             ``with_fillers``
        transfer, on_train_batch_start                                                 ``TrainingStep.start_batch``
        training_step                                                                  ``forward_pass``
        after the first forward pass:                                                  ``begin_backward``
            [R] read the control reduction, unless the weight of the window is known   ``ReducedTotals.wait``
            on_before_zero_grad, drop the gradients of the previous step
        check the loss, where the policy for non-finite values says so                 ``LossChecks.note``
        before the last backward pass:                                                 ``backward_pass``
            [R] start the reduction of two flags: any rank had a loss, any was not finite    ``StepFlags.send``
        on_before_backward, backward, on_after_backward                                ``Passes.contribute``
            [R] the last backward pass reduces the gradients; each one does where      ``Passes.run``
            on_after_backward is overridden
        on_train_batch_end, except for the last micro-batch                            ``end_micro_batch``
    [R] read the control reduction, if not before; exchange and handle signals         ``ReducedTotals.close``
    [R] read the flags: every rank or none updates                                     ``StepFlags.read``
    unscale, check gradients, on_before_optimizer_step, clip, step                     ``Updater.bound``
    global_step, weight averages, learning rates, the counters of batches              ``_update``
    on_train_batch_end of the last micro-batch

On one rank signals are handled after the step, in ``FitLoop._steps``.

A rank with fewer micro-batches than the others, or with a batch without a loss, still runs all collectives. If passes
through the model contain collectives, its window is filled up with filler batches, micro-batches of weight 0 (see
``filler_batches``). Otherwise it joins the reduction of gradients once, by ``Strategy.zero_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.accumulation_window import MicroBatches, Windows
from ..parallel.step_flags import LocalFlags, MessageFlags, StepFlags
from ..parallel.strategy import StepFunction
from ..run.overrides import backward_of, weighing
from ..run.run import Run
from ..watchdog.heartbeat import LAST_BACKWARD, UPDATE
from ..window.passes import Passes, weighted
from .filler_batches import FILLER, LockstepFiller, lockstep_filler
from .step_base import TrainingStep
from .step_output import loss_of, outputs_for_hooks
from .user_update import UserUpdate
from .window_batches import with_fillers, with_weights
from .window_totals import LocalTotals, ReducedTotals

_WEIGHTS_OF_ONE = (1.0,)


class AutomaticStep(TrainingStep):
    """Runs forward, backward and update for an accumulation window, with one optimizer."""

    reduces_after_window: bool = False
    """Whether gradients are reduced after the last backward pass, instead of in it."""
    around_update: Callable[[Callable[[], bool]], bool] | None = None
    """Calls the update of the weights; None to call it directly. ``RecoveringStep`` sets it."""
    accepts: Callable[[], bool] | None = None
    """Returns whether the gradients of a window are used; if not, the window is run again. None: they are.
    ``VerifiedStep`` sets it for a window that it runs."""

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
        self.updater = run.updater
        self.updater.defers_scale = False
        self.optimizer = run.optimizers[0]
        self.coming_windows = windows
        backward = backward_of(module, self.strategy)
        self.passes = Passes(self.strategy, run.scaler, backward, self.before_backward, self.after_backward)
        reduces_each = bool(self.after_backward) and not self.reduces_after_window
        weigh = weighing(module, self.strategy.part)
        self.has_backward_hooks = bool(self.before_backward or self.after_backward)
        self.batch_weight = weigh and self.meter.adding(weigh)
        self._use_filler(lockstep_filler(run, transfer, windows, reduces_each))
        self.is_watching = True  # until the first loss; then the step is routed again without the check of its output
        self.forward = self.routed()
        self.scaler, self.has_loss = run.scaler, False
        self.flags = self._flags()
        self.update = UserUpdate(run, self.before_update, clipping, self.around_update)
        self.before_zero_grad = run.hooks("on_before_zero_grad")
        self.zero_grad = self.update.zero_grad
        self.apply = self.update.apply
        self.step_schedulers = any(each.interval == "step" and not each.needs_metric for each in run.schedulers)
        # With several ranks the hooks of the first batch run before the control reduction starts, so that a signal
        # that they raise is part of it and takes effect in this step instead of the next. Without hooks the reduction
        # starts first, so that it overlaps with the transfer of the batch.
        self.starts_early = self.is_distributed and bool(self.batch_start)
        self.takes_single = True
        """Whether windows of one micro-batch may be run without the calls that only others need."""
        self.last_batch: Any = None

    def __call__(self, batches: MicroBatches, size: int, samples: Sequence[float] | None = None) -> bool:
        """Run a window of micro-batches; return False without a step. Collective.

        There is none at the end of the epoch, where no rank has a micro-batch, and where all ranks have requested a
        stop before it.

        Args:
            batches: this rank's micro-batches, fewer than ``size`` or none where its data has run out.
            size: the number of micro-batches in the window, the same on every rank.
            samples: of each micro-batch of a global batch, which counts as one batch. None: each micro-batch counts.

        Raises:
            LoopError: the output of ``training_step`` is not a loss, or no filler batch can be found.
            NonFiniteError: on all ranks; a loss or gradient is not finite, and the policy raises.
            DesyncError: on all ranks; they are at different optimizer steps.
        """
        several = self.is_distributed
        is_weighted = self.batch_weight is not None or (several and samples is not None)
        if len(batches) != 1 or size != 1 or is_weighted or self.filler is not None or not self.takes_single:
            return self._run_window(batches, size, samples)
        # The same phases for a window of one micro-batch of weight 1, without fillers. Each call that it leaves out
        # counts in the step of a small model.
        self.epoch_skipped = False
        (batch,) = batches
        index = self.progress.batch_in_epoch
        is_started = several and self.starts_early and not self.triggers.raised
        if several:
            self.last_batch = batch
            if is_started:
                batch = self.start_batch(batch, index)
            if self.totals.open(batch, _WEIGHTS_OF_ONE, 1) == 0:
                return False
            self.passes.sync(True)
            # After the fetch: a rank that waits for its data is behind the others.
            self.phase[0] = 0
        # Saves are refused until the update: a checkpoint in between would lose the accumulated gradients.
        self.run.in_window = True
        if not is_started:
            batch = self.start_batch(batch, index)
        output = None if self.epoch_skipped else self.forward(batch, index)
        loss = output if output.__class__ is Tensor else loss_of(output)
        if several:
            self.totals.wait()
            self.flags.reset()
        has_loss = loss is not None
        if not has_loss:
            self._drop_from_log()
        elif self.is_watching:
            self.is_watching, self.forward = False, self.routed()
        for hook in self.before_zero_grad:
            hook(self.optimizer)
        self.zero_grad()
        self.phase[0] = LAST_BACKWARD
        if loss is not None:
            self.loss_checks.note(loss)
        nonfinite = self.guard.bad is not None
        if several:
            self.flags.send(has_loss, nonfinite)
        if loss is not None:
            # On one rank ``passes.mean_weight`` may be left over from an earlier window.
            factor = 1.0 / self.totals.mean_weight if several else 1.0
            loss = loss if factor == 1.0 and self.scaler is None else weighted(loss, factor, self.scaler)
            backward = self.passes.contribute if self.has_backward_hooks else self.passes.run_backward
            backward(loss)
        elif several:
            self.strategy.zero_backward()
        if several:
            self.totals.close()
            has_loss, nonfinite = self.flags.read(self.guard.checks.losses)
        self._update(has_loss, nonfinite, 1, index)
        self.run.in_window = False
        if self.epoch_skipped:
            if several:
                self._end_without_loss(index)
        elif self.batch_end:
            self.end_micro_batch(output, batch, index)
        return True

    def _run_window(self, batches: MicroBatches, size: int, samples: Sequence[float] | None) -> bool:
        """Run a window of any number of micro-batches on any number of ranks. Collective."""
        self.epoch_skipped = False
        index, count = self.progress.batch_in_epoch, len(batches)
        # The batches of the epoch that the window counts as, and the distance of the indices of its micro-batches:
        # those of a global batch have one index.
        consumed, stride = (size, 1) if samples is None else (1, 0)
        batches, weights = with_weights(batches, self.batch_weight, samples)
        fetched = with_fillers(batches, weights, (self.meter.fetched, self.pace.fetched), self.filler)
        first = next(fetched)
        # After a request to stop, for which this window may not run, its hooks come later.
        started = [self.start_micro_batch(first[0], index)] if self.starts_early and not self.triggers.raised else []
        num_passes = self.totals.open(first[0], weights, size)
        if num_passes == 0:
            return False
        # Saves are refused until the update: a checkpoint in between would lose the accumulated gradients.
        self.run.in_window = True
        self.has_loss = False
        window = SequentialWindow(self, first, fetched, started, index, stride, count)
        self.passes.run(num_passes, window)
        self.totals.close()
        self._end_window(window.ended, consumed, index + max(count - 1, 0) * stride)
        return True

    def _end_window(self, ended: tuple[Any, Any, int] | None, consumed: int, index: int) -> None:
        """Update, and call the hooks of the last micro-batch: its output, itself and its index, None without one."""
        has_loss, nonfinite = self.flags.read(self.guard.checks.losses)
        if self.accepts is not None and has_loss and not self.accepts():
            return
        self._update(has_loss, nonfinite, consumed, index)
        self.run.in_window = False
        # Callbacks may call collectives after an update, for example to save, so ranks without a loss call them too.
        if ended is not None and not self.epoch_skipped:
            self.end_micro_batch(*ended)
        elif self.is_distributed:
            self._end_without_loss(index)

    # ---- the phases of a micro-batch -------------------------------------------------------------------------------

    def start_micro_batch(self, batch: Any, index: int) -> Any:
        """Start a batch and return it, or a filler if a hook has skipped this or an earlier batch of the epoch."""
        self.last_batch = self.last_batch if batch is FILLER else batch
        if batch is FILLER or self.epoch_skipped:
            return FILLER
        batch = self.start_batch(batch, index)
        if self.epoch_skipped:
            self._drop_from_log()
        return FILLER if self.epoch_skipped else batch

    def forward_pass(self, batch: Any, index: int) -> tuple[Any, Tensor | None]:
        """Run the user's step on a batch; return its output, and its loss if it has one."""
        if batch is FILLER:
            # In lockstep a filler is a full pass, because the forward pass contains collectives. Otherwise it is empty.
            return (None if self.filler is None else self.forward(FILLER, index)), None
        output = self.forward(batch, index)
        loss = output if output.__class__ is Tensor else loss_of(output)
        if loss is None:
            self._drop_from_log()
        elif self.is_watching:
            self.is_watching, self.forward = False, self.routed()
        return output, loss

    def _drop_from_log(self) -> None:
        """Allow this rank to log fewer names than the others, which may log in steps in which it has no loss."""
        if self.is_distributed:
            self.log.drop_batch()

    def begin_backward(self) -> None:
        """Read the totals of the window, call the hooks, and drop the gradients and flags of the previous step."""
        self.totals.wait()
        self.passes.mean_weight = self.totals.mean_weight
        for hook in self.before_zero_grad:
            hook(self.optimizer)
        self.zero_grad()
        self.flags.reset()

    def backward_pass(self, loss: Tensor | None, weight: float, is_last: bool) -> None:
        """Run the backward pass of a micro-batch; without a loss on this rank, run only its collectives."""
        if is_last:
            self.phase[0] = LAST_BACKWARD
        if loss is not None and weight != 0:
            self.has_loss = True
            self.loss_checks.note(loss)
        if is_last:
            # Before the backward pass, which overlaps with the reduction of the flags.
            self.flags.send(self.has_loss, self.guard.bad is not None)
        self.passes.backward(loss, weight, is_last)

    def end_micro_batch(self, output: Any, batch: Any, index: int) -> None:
        """Call ``on_train_batch_end``."""
        if self.batch_end:
            outputs = outputs_for_hooks(output)
            for hook in self.batch_end:
                hook(outputs, batch, index)

    def _end_without_loss(self, index: int) -> None:
        """Call the callbacks, which may call collectives, after a step to which this rank contributed nothing."""
        module, log = self.run.module, self.run.module.log_to(None)
        for hook in self.callbacks_batch_end:
            hook({"loss": torch.zeros(())}, self.last_batch, index)
        module.log_to(log)

    # ---- the update ------------------------------------------------------------------------------------------------

    def _update(self, has_loss: bool, nonfinite: bool, consumed: int, index: int) -> None:
        """Update the weights if any rank had a loss and every loss was finite, as all ranks agree. Collective."""
        self.phase[0] = UPDATE
        self.update.index = index
        step = self.progress.global_step
        if nonfinite:
            # Do not report this to the loss scaler: the overflow is not caused by the scale.
            self.guard.handle_loss()
            self.updater.discard(self.optimizer)
        elif has_loss and self.apply():
            self.guard.in_a_row = 0
            self.progress.global_step += 1
            if self.averages is not None:
                self.averages.after_step(self.progress.global_step - 1)
            if self.step_schedulers:
                self.run.update_learning_rates("step")
        elif not has_loss:
            self.loss_watch.count_missing(self.epoch_skipped)
        self.advance_trained(consumed)
        if self.progress.global_step == step:
            self.after_no_update()

    # ---- resolved once ---------------------------------------------------------------------------------------------

    def _use_filler(self, filler: LockstepFiller | None) -> None:
        self.filler = self.passes.filler = filler
        windows = self.coming_windows if self.batch_weight is None else None
        self.totals = ReducedTotals(self.run, filler, windows) if self.is_distributed else LocalTotals()
        self.attendance.varies = filler is not None

    def meet_calls(self) -> None:
        """Run fillers on ranks without data from now on: the user's step calls collectives, as it did on all ranks."""
        super().meet_calls()
        if self.filler is None and self.strategy.window_passes is None:
            self._use_filler(LockstepFiller(self.run, self.transfer, self.coming_windows, True))
            self.forward = self.routed()

    def _flags(self) -> StepFlags:
        if not self.is_distributed:
            return LocalFlags()
        return self.strategy.flags or MessageFlags(self.run.world)

    def refresh(self) -> None:
        """Refresh the values that may change between epochs. Collective."""
        super().refresh()
        # A strategy that has wrapped the module again, for example after unfreezing, has a new flags object.
        self.flags = self._flags()

    def routed(self, training: bool = True) -> StepFunction:
        """Return the user's step in the precision's context, routed through the strategy, with fillers where needed."""
        step = super().routed(training)
        return step if self.filler is None else self.filler.hide_loss(step)

    def user_step(self) -> StepFunction:
        """Return the user's step, wrapped so that a batch without a loss is replaced by a filler batch where needed."""
        step = self.loss_watch.watched(super().user_step())
        return step if self.filler is None else self.filler.wrap(step)

    def flush(self) -> None:
        """Wait for losses that are still being checked, and remove the filler hooks from the module."""
        super().flush()
        if self.filler is not None:
            self.filler.release()


class SequentialWindow:
    """The passes of one window that run one after another, for ``Passes.run``.

    Args:
        step: runs the phases of each micro-batch.
        first: the first micro-batch of this rank, or a filler, and its weight.
        others: the others with their weights, followed by fillers.
        started: the first micro-batch, where it was started before the control reduction; else empty.
        index: the index in the epoch of the first micro-batch.
        stride: the distance between the indices of two micro-batches: 0 if all are parts of one global batch, else 1.
        count: the number of this rank's micro-batches, without fillers.
    """

    def __init__(
        self,
        step: AutomaticStep,
        first: tuple[Any, float],
        others: Iterator[tuple[Any, float]],
        started: list[Any],
        index: int,
        stride: int,
        count: int,
    ) -> None:
        self._step = step
        self._fetched, self._weight = first
        self._others = others
        self._started = started
        self._index, self._stride, self._count = index, stride, count
        self._batch: Any = FILLER
        self._output: Any = None
        self.ended: tuple[Any, Any, int] | None = None
        """The output of the last micro-batch, itself and its index; None without one."""

    def forward(self, position: int) -> Tensor | None:
        """Fetch and start a micro-batch, and run the user's step."""
        step, index = self._step, self._index + position * self._stride
        if position > 0:
            # A device may still compute the previous backward pass.
            self._fetched, self._weight = next(self._others)
        # After the fetch: a rank that waits for its data is behind the others.
        step.phase[0] = position
        self._batch = self._started.pop() if self._started else step.start_micro_batch(self._fetched, index)
        self._output, loss = step.forward_pass(self._batch, index)
        return loss

    def begin_backward(self) -> None:
        """Prepare the first backward pass."""
        self._step.begin_backward()

    def backward(self, loss: Tensor | None, position: int, is_last: bool) -> None:
        """Run the backward pass, and end a micro-batch that is not the last."""
        self._step.backward_pass(loss, self._weight, is_last)
        if self._batch is not FILLER:
            self.ended = self._output, self._batch, self._index + position * self._stride
            if position < self._count - 1:
                self._step.end_micro_batch(*self.ended)
