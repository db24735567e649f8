"""Manual optimization: the user's ``training_step`` calls backward and the optimizers itself.

Gradients are averaged over ranks: each rank's batch counts the same. Optimizers call collectives in the user's step, so
every rank must run it: where only some ranks have a batch, at the end of an epoch, the others repeat one. The loss of a
repeated batch is multiplied by 0, and the others by ``ranks / ranks with a batch``, which makes the average that of the
batches. Unlike the fillers of automatic optimization, a repeated batch leaves its traces in the program's attributes,
which may decide whether an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.errors import LoopError
from ..core.optimizer_config import parameters_of
from ..data.accumulation_window import MicroBatches
from ..diagnostics.isolated_step import isolated
from ..parallel.fresh_batches import fresh
from ..parallel.strategy import StepFunction
from ..parallel.zero_backward import zero_gradients
from ..run.overrides import is_overridden
from ..run.run import Run
from ..window.passes import weighted
from .backward_average import BackwardAverage
from .filler_batches import as_filler
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
        self.average = BackwardAverage(run, self._averaged) if several else None
        self.counted_windows = _COUNTED_BATCHES
        self.forward = self.routed()
        module = run.module
        self.batch_weight = self.meter.adding(module.batch_weight) if self.meter.unit == "tokens" else None
        self.own_backward = module.backward if is_overridden("backward", module) else Tensor.backward
        self.stepped = self.in_step = self.is_counted = False
        self.share = 1.0
        """The factor of losses: other than 1 in a batch that only some ranks have, and 0 on a rank that repeats one."""
        self.is_weighing = self.was_weighed = False
        self.last: Any = None
        """The last batch of this rank, as it was fetched."""
        self.manual_optimizers = [
            ManualOptimizer(each, run, self.guard, self.average, self._note, self._check_weighed)
            for each in run.optimizers
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

    def _averaged(self) -> None:
        """Note that a backward pass has ended, and its gradients are averaged."""
        if not self.is_weighing:
            self._check_weighed()
        self._mark(True)

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
        if self.share:
            self.loss_checks.note(loss)
        for hook in self.before_backward:
            hook(loss)
        self._mark(False)
        self.is_weighing = self.was_weighed = True
        if self.share == 0.0:
            with zero_gradients(loss) as zero:
                self._backward(zero, *args, **kwargs)
        else:
            self._backward(weighted(loss, self.share, self.run.scaler), *args, **kwargs)
        self.is_weighing = False
        for hook in self.after_backward:
            hook()

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and average its gradients where the strategy does not."""
        passes = 0 if self.average is None else self.average.passes
        if self.closes:
            # Only accumulate: it is not known here whether another backward pass follows before the update.
            self.strategy.sync_gradients(False)
        if self.reduced_before:
            options = {**dict(zip(_BACKWARD_ARGUMENTS, args, strict=False)), **kwargs}
            self.strategy.backward(loss, **{name: value for name, value in options.items() if value is not None})
        else:
            self.own_backward(loss, *args, **kwargs)
            if self.average is not None and self.average.passes == passes:
                # No parameter that had a gradient was trained when the epoch began.
                self.average.reduce()

    def _check_weighed(self) -> None:
        """Refuse gradients of a batch that only some ranks have, unless ``manual_backward`` has computed them."""
        if self.share != 1.0 and not self.was_weighed:
            raise LoopError(
                "Not every rank has a batch here, at the end of an epoch, and the ranks without one repeat a batch "
                "whose gradients must not count, which takes self.manual_backward(loss) instead of loss.backward(): "
                "call that, or give a number of batches that is divisible by the number of ranks."
            )

    def __call__(self, batches: MicroBatches, consumed: int, samples: Sequence[float] | None = None) -> bool:
        """Run a batch; return False if no rank had one. Collective."""
        index = self.progress.batch_in_epoch
        self.epoch_skipped = False
        if self.batch_weight is not None:
            for batch in batches:
                # Before the transfer: a number on a device would be waited for.
                self.batch_weight(batch)
        if self.is_distributed and batches:
            # Before the step, which may modify the batch's containers.
            batches = list(batches)
            self.last = fresh(batches[-1])
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
            if agreement.ranks_with_data < self.run.world.size:
                if not agreement.ranks_with_data or self.progress.epoch_cut:
                    return False
                with self._uneven(bool(used), agreement.ranks_with_data) as repeated:
                    for batch in batches if used else repeated:
                        self._run_batch(batch, index, consumed)
                return True
        elif self.epoch_skipped:
            return False
        for batch in batches:
            self._run_batch(batch, index, consumed)
        return True

    @contextmanager
    def _uneven(self, has_batch: bool, count: int) -> Generator[Sequence[Any], None, None]:
        """Weigh the losses of a batch that only ``count`` ranks have; yield what others repeat. Collective."""
        run, world = self.run, self.run.world
        attendance, varies = world.attendance, world.attendance.varies
        holds = world.all_gather_object(self.last is not None)
        if not all(holds):
            source = holds.index(True)
            shared = world.broadcast_object(self.last if world.rank == source else None, source)
            self.last = shared if self.last is None else self.last
        attendance.varies = True
        try:
            if has_batch:
                self.share = world.size / count
                yield ()
                return
            self.share = 0.0
            batch = fresh(self.last)
            with as_filler(run), isolated(run.module, keep_program=False):
                yield [batch if self.transfer is None else self.transfer(batch)]
        finally:
            attendance.varies, self.share = varies, 1.0

    def _run_batch(self, batch: Any, index: int, consumed: int) -> None:
        self.stepped, self.in_step, self.was_weighed = False, True, False
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
