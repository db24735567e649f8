"""Manual optimization: the user's ``training_step`` calls backward and the optimizers itself.

Gradients are averaged over ranks: each rank's batch counts the same. Optimizers call collectives in the user's step, so
every rank must run it: where only some ranks have a batch, at the end of an epoch, the others repeat one. The loss of a
repeated batch is multiplied by 0, and the others by ``ranks / ranks with a batch``, which makes the average that of the
batches. Unlike the fillers of automatic optimization, a repeated batch leaves its traces in the program's attributes,
which may decide whether an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
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
from .filler_batches import as_filler
from .manual_optimizer import BackwardAverage, ManualOptimizer, closes_windows
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
        self.module_start = run.module_hook("on_train_batch_start")
        self.last: Any = None
        """The last batch of this rank, as it was fetched."""
        self.manual_optimizers = [
            ManualOptimizer(each, run, self.guard, self.average, self._note, self._check_weighed, self.weigh)
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
            # A backward pass may be that of a hook.
            with as_filler(self.run), zero_gradients(loss) as zero:
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
        own = list(batches)
        if self.is_distributed:
            return self._run_on_ranks(own, index, consumed)
        started = [self.start_batch(batch, index) for batch in own]
        if self.epoch_skipped:
            return False
        for batch in started:
            self._run_batch(batch, index, consumed)
        return True

    def _run_on_ranks(self, own: list[Any], index: int, consumed: int) -> bool:
        """Run a batch on several ranks; return False if no rank had one. Collective."""
        size = self.run.world.size
        if own:
            # Before the step, which may modify the batch's containers.
            self.last = fresh(own[-1])
        with ExitStack() as stack:
            holders = 0
            if self.module_start:
                # It may step optimizers, so it runs on all ranks, as soon as these know who has a batch.
                holders = self._holders(bool(own))
                if 0 < holders < size:
                    stack.enter_context(self._uneven(bool(own), holders))
            started = self._start(own, index) if own or holders else []
            used = 0 if self.epoch_skipped else len(started)
            self.triggers.launch(self.progress.steps_reached, float(used), used)
            agreement = self.triggers.read()
            if self.triggers.fired:
                self.run.triggers.handle()
            if agreement.all_raised and self.run.stops_before_step():
                for _ in own:
                    self.log.drop_batch()
                return False
            if agreement.ranks_with_data < size:
                # With that hook, all ranks have a batch or none has, unless it has skipped one.
                if holders or not agreement.ranks_with_data or self.progress.epoch_cut:
                    return False
                stack.enter_context(self._uneven(bool(own), agreement.ranks_with_data))
                started = started or self._start(own, index)
            for batch in started:
                self._run_batch(batch, index, consumed)
            return True

    def _holders(self, has_batch: bool) -> int:
        """Return the number of ranks that have a batch. Collective."""
        (count,) = self.run.world.control_reduce([has_batch]).wait()
        return int(count)

    def _start(self, own: list[Any], index: int) -> list[Any]:
        """Start the batch of this rank, or the one that it repeats, which callbacks do not see."""
        if own:
            return [self.start_batch(batch, index) for batch in own]
        batch = fresh(self.last)
        if self.transfer is not None:
            batch = self.transfer(batch)
        self.loss_checks.index = index
        with self._repeating():
            self.call_start_hooks(self.module_start, batch, index)
        return [batch]

    @contextmanager
    def _uneven(self, has_batch: bool, count: int) -> Generator[None, None, None]:
        """Weigh the losses of a batch that only ``count`` ranks have, and let the others have one. Collective."""
        world = self.run.world
        attendance, varies = world.attendance, world.attendance.varies
        holds = world.all_gather_object(self.last is not None)
        if not all(holds):
            source = holds.index(True)
            shared = world.broadcast_object(self.last if world.rank == source else None, source)
            self.last = shared if self.last is None else self.last
        attendance.varies, self.was_weighed = True, False
        self.share = world.size / count if has_batch else 0.0
        try:
            yield
        finally:
            attendance.varies, self.share = varies, 1.0

    @contextmanager
    def _repeating(self) -> Generator[None, None, None]:
        """Run code with a batch that is repeated: logs, metrics and generators do not see it, nor do other ranks."""
        with as_filler(self.run), isolated(self.run.module, keep_program=False):
            yield

    def weigh(self, loss: Tensor) -> Tensor:
        """Return a value by its share in the mean over ranks, without graph: 0 for that of a repeated batch."""
        return loss.detach() * self.share if self.share else torch.zeros_like(loss)

    def _run_batch(self, batch: Any, index: int, consumed: int) -> None:
        self.stepped, self.in_step = False, True
        if self.average is not None:
            self.average.begin()
        if self.share:
            output = self.forward(batch, index)
        else:
            with self._repeating():
                output = self.forward(batch, index)
        self.updater.finish()
        self.in_step, self.is_counted = False, self.stepped
        if self.stepped:
            self.progress.global_step += 1
        self.advance_trained(consumed)
        if self.stepped and self.averages is not None:
            self.averages.after_step(self.progress.global_step - 1)
        # An update in a hook is noted, too.
        self.stepped = False
        module = self.run.module
        # Not as in the step: the state of metrics, and values in collectives, are those of batches that count.
        log = None if self.share else module.log_to(None)
        for hook in self.batch_end:
            hook(output, batch, index)
        if not self.share:
            module.log_to(log)
        self.updater.finish()
        self.stepped = self.is_counted = False
