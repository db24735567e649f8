"""The common part of automatic and manual optimization: the user's step, its hooks, and checks of its losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..data.accumulation_window import MicroBatches
from ..diagnostics.loss_checks import LossChecks
from ..diagnostics.nonfinite_guard import NonFiniteGuard, Seen
from ..distributed.control import Signal
from ..parallel.strategy import StepFunction
from ..profiling.meter import SampleCount
from ..run.overrides import in_context, with_arity
from ..run.run import Run
from .compiled_flops import counted_step
from .step_output import LossWatch, no_manual_backward


def _nothing() -> None:
    pass


class TrainingStep:
    """Routes the user's step, transfers batches, calls hooks, and checks losses."""

    reruns: bool = True
    """Whether each rank may run the step on one of its batches again, to search for a value that is not finite."""

    def __init__(self, run: Run, transfer: Callable[[Any], Any] | None, nonfinite: str) -> None:
        self.run = run
        self.progress = run.progress
        self.log = run.train_log
        self.triggers = run.triggers
        self.strategy = run.strategy
        self.phase = run.heartbeat.phase
        self.set_position = run.heartbeat.set_position
        self.is_distributed = run.world.size > 1
        self.attendance = run.world.attendance
        run.at_end.callback(setattr, self.attendance, "varies", False)
        self.transfer = transfer
        self.after_no_update: Callable[[], None] = _nothing
        """Called after a window that has made no update."""
        self.batch_start = run.hooks("on_train_batch_start")
        self.batch_end = run.hooks("on_train_batch_end")
        self.callbacks_batch_end = run.callback_hooks("on_train_batch_end")
        self.before_backward = run.hooks("on_before_backward")
        self.after_backward = run.hooks("on_after_backward")
        self.before_update = run.hooks("on_before_optimizer_step")
        self.averages = run.averages if len(run.averages) else None
        self.loss_watch = LossWatch(run)
        run.use_manual([], no_manual_backward)
        self.forward: StepFunction
        # Whether a hook has returned -1, which skips this batch and the rest of the epoch.
        self.epoch_skipped = False
        rerun = self.plain if self.reruns else None
        self.guard = NonFiniteGuard(run, nonfinite, rerun, lambda: Seen(None, self.log.batch, self.loss_checks.index))
        self.loss_checks = LossChecks(run, self.guard)
        self.meter = run.meter
        self.count_samples = SampleCount() if run.meter.unit == "samples" else None
        # For the first windows in which this rank has data; then the step is routed again, without it.
        self.flop_count = run.meter.flop_count
        self.counted_windows = 1
        self.advance_trained = self.advance
        """Counts a window that was trained: its batches, and its tokens or samples after ``count_units``."""
        self.pace = run.triggers.pace
        self.pace.forward_counts = not self.strategy.traits.forward_has_collectives

    def routed(self, training: bool = True) -> StepFunction:
        """Return the user's step in the precision's context, routed through the strategy."""
        context = self.run.fabric.forward_context()
        step = self.user_step()
        if self.flop_count is not None:
            step = counted_step(step, self.flop_count, self.run.module)
        return self.strategy.route(in_context(step, context), training)

    def plain(self) -> StepFunction:
        """Return the user's step in the precision's context, without the strategy's wrapper, as in an evaluation."""
        context = self.run.fabric.forward_context()
        return self.strategy.route(in_context(TrainingStep.user_step(self), context), False)

    def user_step(self) -> StepFunction:
        """Return the user's step."""
        return with_arity(self.run.module.training_step, ("batch", "batch_idx"))

    def count_units(self, units: float, window_units: Callable[[], float]) -> None:
        """Count tokens or samples from now on.

        Args:
            units: those that the run has trained before.
            window_units: returns those of a window over all ranks.
        """
        progress, advance = self.progress, self.advance
        progress.units = units

        def advance_counted(consumed: int) -> None:
            progress.units = (progress.units or 0.0) + window_units()
            advance(consumed)

        self.advance_trained = advance_counted

    def advance(self, consumed: int) -> None:
        """Count the batches of a window, whose update has been counted, and record the next position."""
        progress = self.progress
        progress.batch_in_epoch += consumed
        progress.global_batch += consumed
        progress.steps_reached += 1
        # Before the hooks at the end of the batch: a rank that fails in one, or in a save, has done this step.
        self.set_position(progress.global_step, progress.epoch, progress.batch_in_epoch)
        if self.flop_count is not None and self.meter.open_units > 0:
            self._note_flops()
        if self.is_distributed:
            self.pace.updated()
            if self.attendance.was_called:
                self.meet_calls()

    def skip_window(self, batches: MicroBatches, consumed: int) -> None:
        """Read this rank's micro-batches of a window that the run does not train on, and count it. Not collective."""
        for _ in batches:
            pass
        self.advance(consumed)
        self.after_no_update()

    def meet_calls(self) -> None:
        """Prepare for collectives that the user's code has called in this step."""
        self.attendance.was_called = False

    def _note_flops(self) -> None:
        self.meter.note_flops()
        self.counted_windows -= 1
        if not self.counted_windows:
            self.meter.flop_count = None
            self.flop_count = None
            self.forward = self.routed()

    def start_batch(self, batch: Any, index: int) -> Any:
        """Transfer a batch, pass it to the log and call the hooks; return the batch."""
        if self.transfer is not None:
            batch = self.transfer(batch)
        self.loss_checks.index = index
        self.log.begin_batch(batch, self.strategy.part.share)
        if self.count_samples is not None:
            self.meter.open_units += self.count_samples(batch)
        if self.batch_start:
            self.call_start_hooks(self.batch_start, batch, index)
        return batch

    def call_start_hooks(self, hooks: Sequence[Callable[..., Any]], batch: Any, index: int) -> None:
        """Call hooks ``on_train_batch_start``; one that returns -1 skips this batch and the rest of the epoch."""
        for hook in hooks:
            if hook(batch, index) == -1:
                self.epoch_skipped = True
                self.triggers.set(Signal.END_EPOCH)

    def refresh(self) -> None:
        """Refresh the values that may change between epochs. Collective."""
        if self.strategy.trainability_changed(self.run.module):
            self.forward = self.routed()

    def flush(self) -> None:
        """Wait for losses that are still being checked."""
        self.loss_checks.flush()
