"""Manual optimization: the user's ``training_step`` calls backward and the optimizers itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.errors import DataError
from ..core.optimizer_config import parameters_of
from ..core.wording import counted
from ..data.accumulation_window import MicroBatches
from ..parallel.strategy import StepFunction
from ..run.overrides import is_overridden
from ..run.run import Run
from .backward_average import BackwardAverage
from .manual_optimizer import ManualOptimizer, closes_windows
from .step_base import TrainingStep

# A program may train some of its models in every n-th batch only: the FLOPs are those of an average over these batches,
# a multiple of the usual n.
_COUNTED_BATCHES = 20
_BACKWARD_ARGUMENTS = ("gradient", "retain_graph", "create_graph", "inputs")


class ManualStep(TrainingStep):
    """Calls ``training_step`` for each batch; a batch in which any optimizer stepped counts as one optimizer step."""

    def __init__(self, run: Run, transfer: Callable[[Any], Any] | None, nonfinite: str) -> None:
        super().__init__(run, transfer, nonfinite)
        self.reduced_before = self.strategy.traits.reduces_in_backward
        self.closes = closes_windows(self.strategy.traits)
        # With other strategies gradients are averaged at the end of each backward pass. The strategy's own forward and
        # backward, which expect one backward pass for each forward pass, are bypassed.
        several = self.is_distributed and not self.reduced_before
        self.average = BackwardAverage(run, partial(self._mark, True)) if several else None
        self.counted_windows = _COUNTED_BATCHES
        self.forward = self.routed()
        module = run.module
        self.batch_weight = self.meter.adding(module.batch_weight) if self.meter.unit == "tokens" else None
        self.own_backward = module.backward if is_overridden("backward", module) else Tensor.backward
        self.stepped = self.in_step = self.is_counted = False
        self.was_told = False
        self.manual_optimizers = [
            ManualOptimizer(each, run, self.guard, self.average, self._note) for each in run.optimizers
        ]
        run.use_manual(self.manual_optimizers, self.manual_backward)
        self.updater = run.updater
        self.updater.defers_scale = True
        # Methods of the optimizer's own, such as the second step of SAM, call the step of an optimizer inside.
        run.at_end.callback(register_optimizer_step_post_hook(self._any_stepped).remove)

    def refresh(self) -> None:
        """Refresh the values that may change between epochs. Collective."""
        super().refresh()
        if self.average is not None:
            self.average.refresh()

    def routed(self, training: bool = True) -> StepFunction:
        """Return the user's step, through the strategy's own forward if that reduces in the backward pass."""
        return super().routed(training and self.reduced_before)

    def _mark(self, reduced: bool) -> None:
        # Any optimizer may hold parameters of the loss.
        for optimizer in self.manual_optimizers:
            optimizer.reduced = reduced

    def _any_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.stepped:
            return
        own = {id(parameter) for each in self.run.optimizers for parameter in parameters_of(each)[:1]}
        if optimizer in self.run.optimizers or not own.isdisjoint(map(id, parameters_of(optimizer))):
            self._note()

    def _note(self) -> None:
        """Note an update, and count it if it is outside of ``training_step``, such as in a hook."""
        self.stepped = True
        self.run.keep_rates()
        if not self.in_step and not self.is_counted:
            self._count()

    def _count(self) -> None:
        self.is_counted = True
        progress = self.progress
        progress.global_step += 1
        self.set_position(progress.global_step, progress.epoch, progress.batch_in_epoch)
        if self.averages is not None:
            self.averages.after_step(progress.global_step - 1)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss, scaled if the precision uses loss scaling."""
        scaler = self.run.scaler
        self.note_loss(loss)
        for hook in self.before_backward:
            hook(loss)
        self._mark(False)
        scaled = loss if scaler is None else loss * scaler.scale
        passes = 0 if self.average is None else self.average.passes
        if self.closes:
            # Only accumulate: it is not known here whether another backward pass follows before the update.
            self.strategy.sync_gradients(False)
        if self.reduced_before:
            options = {**dict(zip(_BACKWARD_ARGUMENTS, args, strict=False)), **kwargs}
            self.strategy.backward(scaled, **{name: value for name, value in options.items() if value is not None})
        else:
            self.own_backward(scaled, *args, **kwargs)
            if self.average is not None and self.average.passes == passes:
                # No parameter that had a gradient was trained when the epoch began.
                self.average.reduce()
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
            if agreement.all_raised and self.run.stops_before_step():
                for _ in batches:
                    self.log.drop_batch()
                return False
            # Optimizers call collectives in the user's step, which all ranks must run: batches that only some ranks
            # have are dropped.
            if agreement.ranks_with_data < self.run.world.size:
                if agreement.ranks_with_data and not self.progress.epoch_cut:
                    self._report_dropped(agreement.ranks_with_data)
                return False
        elif self.epoch_skipped:
            return False
        for batch in batches:
            self._run_batch(batch, index, consumed)
        return True

    def _run_batch(self, batch: Any, index: int, consumed: int) -> None:
        self.stepped, self.in_step = False, True
        if self.average is not None:
            self.average.begin()
        output = self.forward(batch, index)
        self.updater.finish()
        self.in_step, self.is_counted = False, self.stepped
        if self.stepped:
            self.progress.global_step += 1
        self.advance(consumed)
        if self.stepped and self.averages is not None:
            self.averages.after_step(self.progress.global_step - 1)
        # An update in a hook is noted, too.
        self.stepped = False
        for hook in self.batch_end:
            hook(output, batch, index)
        self.updater.finish()
        self.stepped = self.is_counted = False

    def _report_dropped(self, count: int) -> None:
        """Report batches at the end of an epoch that only some ranks have, once.

        Raises:
            DataError: on all ranks; there are no others.
        """
        size, rule = self.run.world.size, "under manual optimization every rank needs a batch in each step"
        if self.progress.global_batch == 0:
            raise DataError(
                f"the training data has {counted(count, 'batch')} for {size} ranks, but {rule}: give more "
                "batches, or use automatic optimization or fewer ranks."
            )
        if not self.was_told:
            self.was_told = True
            last = "batch of each epoch is" if count == 1 else f"{count:,} batches of each epoch are"
            self.run.note(
                f"The last {last} dropped: {rule}. Give a number of batches that is divisible by the {size} ranks, "
                "or use automatic optimization."
            )
