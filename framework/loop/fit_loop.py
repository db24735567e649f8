"""The training loop.

    on_fit_start
    sanity check of the validation loop
    on_train_start
    for each epoch:
        on_train_epoch_start
        for each window of micro-batches, which is one optimizer step:
            fetch the window
            advance schedulers with interval "step" that read a metric, for the previous step and its validation
            for each micro-batch (``AutomaticStep``, whose file has all phases):
                on_train_batch_start -> training_step -> (zero_grad at the first) -> backward
                (after the last: clip, update, other schedulers with interval "step") -> on_train_batch_end
            send the values of the step to the loggers if due, handle signals, validate if due, stop if due
        validate if due; advance these schedulers for the last step
        on_train_epoch_end; reduce metrics in one collective
        advance schedulers with interval "epoch"; the epoch counts as ended
        on_train_epoch_end of callbacks that monitor metrics: ``ModelCheckpoint`` saves here
        exchange signals, such as a request to stop
    on_train_end, on_fit_end

``assemble_fit`` (trainer/assembly.py) builds the loop, and lists the order in which a checkpoint is put back before it
runs. Two parts follow in the loop: ``Windows.begin`` opens the data at the checkpoint's position, and
``RepeatedSection.restore_generators`` sets the random generators, after the hooks that are called again.

A boundary is the end of an optimizer step. Between two boundaries no decision depends on a value that only one rank
knows: ranks that decide differently would call different collectives, and the job would hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import CheckpointError, DataError
from ..core.intervals import COUNTED
from ..data.accumulation_window import MicroBatches, Windows
from ..metrics.no_log import NoLog
from ..resume.ended_fit import EndedFit
from ..resume.preempted_save import exchange_signals, leave_if_preempted
from ..resume.snapshots import NoSnapshots, Snapshots
from ..run.run import Run
from .automatic_step import AutomaticStep
from .evaluation_loop import logging_to
from .fit_notes import FitNotes
from .fit_plan import FitPlan, estimate_steps
from .fit_validation import FitValidation
from .manual_step import ManualStep
from .sequence_check import check_parts
from .unit_count import window_units
from .verified_step import VerifiedStep

_REDUCED = NoLog(
    "on_train_epoch_end of a callback that monitors, which runs after the metrics of the epoch are reduced",
    "log in an earlier hook, or set monitors = False in the callback",
)


class FitLoop:
    """One fit: the accumulation windows of its data, the training step, and the plan of limits and intervals."""

    def __init__(self, run: Run, plan: FitPlan, windows: Windows, clock: Callable[[], float]) -> None:
        self.run = run
        self.plan = plan
        self.windows = windows
        self.step: AutomaticStep | ManualStep
        self._window_step: Callable[..., bool]
        """Runs a window: the step, or what verifies it."""
        self._reload_every = 0
        self._reload: Callable[[], None] | None = None
        self.validation = FitValidation(run, plan, clock)
        self._step_limit = plan.step_limit
        self._notes = FitNotes(run, plan)
        self._compared_ranks = False
        self._before_cut_end: dict[str, Any] | None = None
        """The state of this rank before the end of an epoch that a stop has cut short; None after a whole epoch."""
        run.triggers.tally = run.meter
        run.allow_stops(self._may_stop_before_step)
        self.snapshots: Snapshots | NoSnapshots = NoSnapshots()
        self.ended: EndedFit | None = None
        """The state of the end of the fit, once that is reached."""

    def use_step(
        self,
        step: AutomaticStep | ManualStep,
        transfer: Callable[[Any, int], Any] | None,
        verify_every: int | None = None,
        has_samples: bool = False,
    ) -> None:
        """Train with this step.

        Args:
            step: the step.
            transfer: moves validation batches to the device.
            verify_every: the number of optimizer steps of which one is verified; None for no verification.
            has_samples: whether micro-batches are weighed by their samples.

        Raises:
            CheckpointError: a limit or an interval needs a count that the checkpoint of the fit does not have.
        """
        self.step = self._window_step = step
        if verify_every is not None:
            assert isinstance(step, AutomaticStep)
            self._window_step = verified = VerifiedStep(step, verify_every)
            self.run.saver.before_save = verified.compare_ranks
        self._count_units(step, has_samples)
        # The report records which batches each optimizer step has consumed.
        step.after_no_update = self.windows.notify_observers
        if self.plan.validation is not None:
            self.plan.validation.transfer = transfer

    def _count_units(self, step: AutomaticStep | ManualStep, has_samples: bool) -> None:
        """Count the tokens or samples of each step, if a limit or an interval needs them."""
        progress, unit = self.run.progress, self.run.meter.unit
        intervals = [each for callback in self.run.callbacks for each in callback.counted_intervals]
        for each in intervals:
            each.check_unit(unit, f"the interval {str(each)!r} of a callback")
        is_needed = self.plan.counted or any(each.unit in COUNTED for each in intervals)
        if not is_needed:
            progress.units, progress.unit = None, ""
            return
        if progress.units is None or (progress.unit not in ("", unit) and progress.global_batch):
            raise CheckpointError(
                f"this fit counts {unit} for a limit or an interval, and the checkpoint that it resumes from has no "
                "count of them: give the limits and intervals in steps, epochs or time."
            )
        progress.unit = unit
        step.count_units(progress.units, window_units(step, has_samples))

    def reload_data(self, every: int, training: Callable[[], None], validation: Callable[[], None]) -> None:
        """Call ``training`` at the start of every ``every``-th epoch, and ``validation`` before the next validation."""
        self._reload_every, self._reload = every, training
        self.validation.reload = validation

    @property
    def epochs_are_alike(self) -> bool:
        """Whether all epochs have the same loaders."""
        return self._reload is None

    def release_data(self) -> None:
        """Release the sources of training and validation data, at the end of the stage."""
        self.windows.release()
        if self.plan.validation is not None:
            self.plan.validation.sources = ()

    def estimated_steps(self) -> int | float:
        """Return the number of optimizer steps of the entire fit; infinite if unknown."""
        plan, windows = self.plan, self.windows
        return estimate_steps(plan.epoch_limit, plan.step_limit, windows.full, windows.schedule)

    def __call__(self) -> None:
        """Train until a limit or a stop. Collective."""
        run = self.run
        progress = run.progress
        run.heartbeat.set_position(progress.global_step, progress.epoch, progress.batch_in_epoch)
        with logging_to(run, NoLog("on_fit_start", "log in on_train_start instead")):
            run.call("on_fit_start")
        outside = run.module.log_to(run.train_log)
        self.validation.sanity_check()
        if self.validation.logged is not None:
            self._notes.after_sanity_check(self.validation.logged)
        run.call("on_train_start")
        exchange_signals(run)
        if run.progress.epoch_ended:
            run.progress.next_epoch()
        while not self._finished():
            self._epoch()
            if self._finished():
                break
            run.progress.next_epoch()
        run.averages.keep_in_module()
        if self._before_cut_end is not None:
            # A resumed run continues the epoch, with the values logged in it so far, and ends it again.
            run.repeated.begin(self._before_cut_end)
        # Before the hooks at the end, which may draw random numbers that a longer fit would not draw here.
        self.ended = EndedFit(run, self.windows)
        with logging_to(run, NoLog("on_train_end or on_fit_end", "log in on_train_epoch_end instead")):
            run.call("on_train_end")
            # The save is complete before the hooks at the end run, so that the paths that they report exist.
            run.saver.finish()
            run.call("on_fit_end")
        run.module.log_to(outside)
        if run.progress.epoch_ended:
            run.progress.next_epoch()

    # ---- an epoch -------------------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        run = self.run
        progress = run.progress
        begins = progress.batch_in_epoch == 0
        self._call_epoch_start(begins)
        self.step.refresh()
        run.averages.begin_epoch()
        if self._reload is not None and begins and progress.epoch and progress.epoch % self._reload_every == 0:
            self._reload()
            self.validation.has_expired_data = True
        self.windows.begin()
        if not begins:
            run.repeated.restore_generators()
        if not self._compared_ranks:
            self._compared_ranks = True
            self.windows.compare_ranks(run.world, run.note)
            check_parts(run, self.windows, self.step)
        step, reached = progress.global_step, progress.steps_reached
        whole = self._batches()
        if begins and whole and not progress.epoch_cut:
            self.step.loss_watch.check_epoch(progress.steps_reached - reached)
        self._end_epoch(whole)
        self.windows.close()
        if begins and progress.epoch_ended and self.windows.full != 0:
            self._notes.after_epoch(progress.global_step - step)

    def _batches(self) -> bool:
        """Train on the epoch's batches; return whether all of them were used."""
        run, log, progress = self.run, self.run.train_log, self.run.progress
        log.in_step = True
        if progress.batch_in_epoch:
            # The checkpoint may have been saved between the optimizer step and the logging or validation that was due
            # after it, so a resumed run does these first.
            if progress.global_step % self.plan.log_every_n_steps == 0 and progress.global_step != progress.published:
                run.metrics.publish_step(progress)
            if self.validation.in_epochs:
                self.validation.run_if_due()
        try:
            return progress.epoch_cut or self._steps()
        finally:
            self.step.flush()
            log.in_step = False
            run.heartbeat.enter("epoch")

    def _steps(self) -> bool:
        """Run optimizer steps until the epoch ends or training stops; return whether all batches were used.

        The body is executed for every step, so values that do not change are bound to local names first: attribute
        look-ups here cost time in every step.
        """
        run, step, take = self.run, self._step_of_epoch(), self.windows.take
        progress, triggers = run.progress, run.triggers
        begin_step = run.heartbeat.step
        one_rank, log_every, validates = run.world.size == 1, self.plan.log_every_n_steps, self.validation.in_epochs
        clock, end_step, publish = time.perf_counter, run.meter.end_step, run.metrics.publish_step
        plateaus, is_first, snapshots = run.has_step_plateaus, True, self.snapshots
        limited = self.plan.max_units is not None
        # The end of each step records the next position.
        run.heartbeat.set_position(progress.global_step, progress.epoch, progress.batch_in_epoch)
        while progress.global_step < self._step_limit:
            began = clock()
            window = take()
            fetched = clock()
            # After the validation that may have followed the previous step.
            if plateaus and window is not None:
                run.update_plateaus()
            # After fetching, so that the watchdog does not count a wait for data as part of the step.
            begin_step()
            # The step returns False where it has not run its window: no rank has a batch left, all ranks have
            # requested a stop before it, or, under manual optimization, a hook has ended the epoch.
            if window is None or not step(*window):
                run.meter.drop_units()
                if run.is_stopped:
                    leave_if_preempted(run)
                    break
                if not self.step.epoch_skipped:
                    self._check_not_empty()
                return True
            end_step(began, fetched)
            if is_first:
                is_first = False
                self._notes.after_first_step()
            # A skipped update does not increase the step count: the values of this count were published already.
            if progress.global_step % log_every == 0 and progress.global_step != progress.published:
                publish(progress)
            # On several ranks the step has taken the signals, and run their handlers, in ``ReducedTotals.close``.
            if one_rank and (triggers.raised or triggers.fired or triggers.posted):
                triggers.take()
                triggers.handle()
            if validates:
                self.validation.run_if_due()
            if progress.global_step >= snapshots.due:
                snapshots.take()
            if progress.epoch_cut:
                return True
            if limited and self._has_units():
                break
            if run.stop_requested and self._may_stop():
                leave_if_preempted(run)
                break
        return self._at_end()

    def _step_of_epoch(self) -> Callable[..., bool]:
        """Return the step for the windows of the epoch in progress."""
        step, progress = self._window_step, self.run.progress
        excluded = self.windows.excluded_in_epoch()
        if not excluded:
            return step
        # Of data whose length is not known, the ranks must find the end together.
        asks = self.windows.end is None and self.run.world.size > 1

        def step_or_skip(batches: MicroBatches, size: int, samples: Sequence[float] | None) -> bool:
            consumed = size if samples is None else 1
            if not excluded.touches(progress.batch_in_epoch, consumed):
                return step(batches, size, samples)
            if asks and not any(self.run.world.all_gather_object(len(batches))):
                return False
            self.step.skip_window(batches, consumed)
            return True

        return step_or_skip

    def _at_end(self) -> bool:
        end = self.windows.end
        return end is not None and self.run.progress.batch_in_epoch >= end

    def _check_not_empty(self) -> None:
        if self.run.progress.global_batch == 0 and not self.run.progress.epoch_cut:
            raise DataError(
                f"{self.windows.source.name} yielded no batch on any rank, so there is nothing to train on: "
                "check the dataset's length, the batch size and drop_last."
            )

    def _end_epoch(self, whole: bool) -> None:
        """Close an epoch. An epoch that a stop has cut short is closed too, but does not count as completed."""
        run = self.run
        progress = run.progress
        if whole:
            run.averages.end_epoch(progress.epoch)
            self.windows.finish()
            self.validation.run_at_epoch_end(None if progress.epoch_cut else self.windows.end)
        run.update_plateaus()
        before, after = run.hooks_around("on_train_epoch_end")
        # A checkpoint that a hook saves here holds the metrics of before the reduction, which a resumed run repeats:
        # with the reduced values it would count the epoch twice.
        with run.repeated.entered() as state:
            run.metrics.publish_epoch(run.train_log, progress, before, run.sanity_checking)
        self._before_cut_end = None if whole else state
        if whole:
            run.update_learning_rates("epoch")
            progress.epoch_ended = True
        with logging_to(run, _REDUCED):
            for hook in after:
                hook()
        exchange_signals(run)

    def _call_epoch_start(self, begins: bool) -> None:
        """Call ``on_train_epoch_start``; call it again in a resumed epoch, because hooks may set up state in it.

        Random numbers drawn and values logged by the first call are part of the checkpoint: after the repeated calls
        ``restore_generators`` sets the generators to those of the checkpoint.
        """
        run = self.run
        hooks = run.hooks("on_train_epoch_start")
        # Those that the interrupted run had called when the checkpoint was saved: within the epoch, all.
        called_before = run.progress.hooks_started if begins else len(hooks)
        for number, hook in enumerate(hooks):
            if number >= called_before:
                run.repeated.restore_generators()
                run.progress.hooks_started = number + 1
                hook()
                continue
            log = run.module.log_to(None)
            hook()
            run.module.log_to(log)
        if begins:
            run.repeated.restore_generators()

    # ---- the end --------------------------------------------------------------------------------------------------

    def _may_stop(self) -> bool:
        plan, progress = self.plan, self.run.progress
        if self.run.preempted_by is not None:
            return not self.run.in_window
        return progress.epochs_done >= (plan.min_epochs or 0) and progress.global_step >= (plan.min_steps or 0)

    def _may_stop_before_step(self) -> bool:
        # A checkpoint cannot hold the state of a loader that has been read further than the last step.
        return self._may_stop() and not (self.run.preempted_by is not None and self.windows.source.keeps_state)

    def _has_units(self) -> bool:
        limit = self.plan.max_units
        return limit is not None and limit.count(self.run.progress) >= limit.number

    def _finished(self) -> bool:
        plan, progress = self.plan, self.run.progress
        if progress.epochs_done >= plan.epoch_limit or progress.global_step >= plan.step_limit:
            return True
        if self._has_units():
            return True
        if self.windows.full == 0:
            # Only with limit_train_batches=0: a loader without batches has raised an error before.
            return True
        return self.run.stop_requested and self._may_stop()
