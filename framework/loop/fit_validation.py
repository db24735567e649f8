"""``FitValidation``: the validations of a fit, by batches, by epochs or by the clock, and the sanity check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..core.intervals import Interval
from ..distributed.control import Signal
from ..metrics.no_log import NoLog
from ..resume.preempted_save import exchange_signals
from ..run.run import Run
from .evaluation_loop import EvaluationPlan, evaluate, logging_to
from .fit_plan import FitPlan


class FitValidation:
    """The validations of a fit.

    Args:
        run: the fit.
        plan: when validations are due.
        clock: returns the time in seconds.
    """

    def __init__(self, run: Run, plan: FitPlan, clock: Callable[[], float]) -> None:
        self.run = run
        self.plan = plan
        self.in_epochs = True
        """Whether a validation may be due within an epoch."""
        self._is_due: Callable[[], bool]
        if plan.validate_every_batches is not None:
            self._is_due = partial(self._batches_are_due, plan.validate_every_batches)
        elif plan.validate_every is not None:
            self._is_due = partial(self._count_is_due, plan.validate_every)
        elif plan.validate_every_seconds is not None:
            self._is_due = partial(self._time_is_up, plan.validate_every_seconds)
        else:
            self.in_epochs = False
        self._clock = clock
        self._last_time = clock()
        self.reload: Callable[[], None] | None = None
        """Requests new loaders."""
        self.has_expired_data = self._was_short = False
        self.logged: set[str] | None = None
        """The names of the metrics that the sanity check has logged; None without one."""

    def run_at_epoch_end(self, expected: int | None) -> None:
        """Validate at the end of an epoch, if the plan says so and no validation has just ended. Collective then.

        Args:
            expected: the number of batches of the epoch by the length of its data; None if unknown.
        """
        progress, every = self.run.progress, self.plan.validate_every_batches
        due = self.plan.validate_at_epoch_end
        if every is not None and expected is not None and self.plan.check_val_every_n_epoch is not None:
            # The data has ended before its length: a validation may have been due after its end.
            due = expected // every > progress.batch_in_epoch // every
            if due and self._epoch_validates() and not self._was_short:
                self._was_short = True
                self.run.note(
                    f"The training data ended after {progress.batch_in_epoch:,} of the {expected:,} batches of its "
                    "length, so a validation within the epoch was not reached: it runs at the end of the epoch."
                )
        if due and self._epoch_validates() and progress.validated_at != progress.global_batch:
            self.validate()

    def _epoch_validates(self) -> bool:
        every = self.plan.check_val_every_n_epoch
        return self.plan.validation is not None and (every is None or (self.run.progress.epoch + 1) % every == 0)

    def run_if_due(self) -> None:
        """Validate within an epoch, if a validation is due after the newest window. Collective then."""
        progress = self.run.progress
        # A preempted run saves and ends without validating, as the grace period may be short. The resumed run
        # validates.
        if self.run.preempted_by is not None:
            return
        if self.plan.validation is None or progress.validated_at == progress.global_batch:
            return
        if self._is_due():
            self.validate()

    def _batches_are_due(self, every: int) -> bool:
        progress, across = self.run.progress, self.plan.check_val_every_n_epoch is None
        count = progress.global_batch if across else progress.batch_in_epoch
        # Counted from the last validation instead of by the remainder: a window of several batches may step over the
        # exact batch.
        validated = max(0, count - (progress.global_batch - progress.validated_at))
        return count // every > validated // every and (across or self._epoch_validates())

    def _count_is_due(self, every: Interval) -> bool:
        # Not ``Due``: a checkpoint that a hook saves before the validation of its step has it still due.
        progress = self.run.progress
        validated = progress.validated_step if every.unit == "steps" else progress.validated_units
        return every.count(progress) // every.number > validated // every.number

    def _time_is_up(self, seconds: float) -> bool:
        # Rank 0's clock decides for all ranks: clocks differ, and validation is collective.
        run = self.run
        if Signal.VALIDATE in run.triggers.fired:
            self._last_time = self._clock()
            return True
        if run.world.is_global_zero and self._clock() - self._last_time >= seconds:
            run.triggers.set(Signal.VALIDATE)
        return False

    def validate(self) -> None:
        """Validate now. Collective."""
        run, plan = self.run, self.plan
        assert plan.validation is not None
        if self.has_expired_data and self.reload is not None:
            self.has_expired_data = False
            self.reload()
        in_step = run.train_log.in_step
        run.train_log.in_step = False
        for hook in run.module_hook("on_validation_model_zero_grad"):
            hook()

        def validated() -> None:
            run.repeated.end()
            progress = run.progress
            progress.validated_at, progress.validated_step = progress.global_batch, progress.global_step
            progress.validated_units = progress.units or 0.0

        # A checkpoint saved during a validation has the validation still due: a resumed run repeats all of it.
        with run.repeated.entered():
            evaluate(run, plan.validation, validated)
        run.train_log.in_step = in_step
        exchange_signals(run)

    def sanity_check(self) -> None:
        """Try some batches of the validation loop before training; nothing of it is logged. Collective."""
        run, plan = self.run, self.plan
        if plan.validation is None or plan.sanity_batches == 0 or run.progress.global_batch:
            return
        whole = plan.validation
        limit = plan.sanity_batches
        short = [limit if own is None else own if limit is None else min(own, limit) for own in whole.limits]
        run.sanity_checking = True
        trial = EvaluationPlan(
            whole.stage, whole.sources, short, whole.transfer, whole.inference_mode, noted=whole.noted
        )
        with logging_to(run, NoLog("a hook of the sanity check", "use on_validation_start or on_validation_epoch_end")):
            run.call("on_sanity_check_start")
            evaluate(run, trial)
            run.call("on_sanity_check_end")
        run.sanity_checking = False
        self.logged = set(run.metrics.view("callback"))
        run.metrics.clear()
