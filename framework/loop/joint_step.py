"""``JointStep``: an optimizer step whose passes a strategy runs together, such as those of a pipeline.

    start the control reduction; transfer and start each micro-batch of the window
    read the control reduction, drop the gradients of the previous step
    the strategy runs all passes (``WindowPasses.run``), which call the user's step
    handle signals, agree on the flags, average gradients over the ranks that read other data
    on_train_batch_end of all micro-batches but the last; clip, update, learning rates; that of the last

Ranks that read the same data take part in the same passes. Only those that see the outputs of the user's step log
values and check losses; the others are given the losses for their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError
from ..core.optimizer_config import parameters_of
from ..data.accumulation_window import MicroBatches
from ..parallel.strategy import WindowPasses
from ..run.run import Run
from ..watchdog.heartbeat import LAST_BACKWARD
from .automatic_step import AutomaticStep
from .filler_batches import FILLER
from .step_output import loss_of, outputs_for_hooks
from .window_batches import with_fillers, with_weights


class JointStep(AutomaticStep):
    """Runs windows by ``WindowPasses``.

    Args:
        run: the fit.
        transfer: moves a batch to the device; None if it is there already.
        nonfinite: the policy for losses that are not finite.
        clipping: the clip value, None for no clipping, and algorithm.
        passes: runs the passes of a window.

    Raises:
        ConfigurationError: a hook must run around each backward pass.
    """

    reruns = False
    """Ranks see the losses of different micro-batches, and one step takes several of them."""

    def __init__(
        self,
        run: Run,
        transfer: Callable[[Any], Any] | None,
        nonfinite: str,
        clipping: tuple[float | None, str],
        passes: WindowPasses,
    ) -> None:
        super().__init__(run, transfer, nonfinite, clipping)
        self.joint = passes
        if self.before_backward or self.after_backward:
            raise ConfigurationError(
                f"on_before_backward and on_after_backward are called around each backward pass, and strategy="
                f"{run.strategy.name!r} runs those of a window together: use on_before_optimizer_step or "
                "on_train_batch_end."
            )
        self.starts_early = self.is_distributed
        self.takes_single = False
        self.outputs: dict[int, Any] = {}
        """The outputs of the window in progress by position, on ranks that see them."""
        self.shown: tuple[str, ...] = ()
        """The names of the step values that ranks which do not log show."""

    def __call__(self, batches: MicroBatches, size: int, samples: Sequence[float] | None = None) -> bool:
        """Run a window of micro-batches; return False at the end of the epoch. Collective. See ``AutomaticStep``."""
        self.epoch_skipped = False
        index, count = self.progress.batch_in_epoch, len(batches)
        consumed, stride = (size, 1) if samples is None else (1, 0)
        batches, weights = with_weights(batches, self.batch_weight, samples)
        coming = with_fillers(batches, weights, (self.meter.fetched, self.pace.fetched), None)
        fetched, _ = next(coming)
        starts_early = self.starts_early and not self.triggers.raised
        first = self.start_micro_batch(fetched, index) if starts_early else FILLER
        if self.totals.open(fetched, weights, size) == 0:
            return False
        if not starts_early:
            first = self.start_micro_batch(fetched, index)
        # The part of each micro-batch's weight that is in this rank's part of its sequences.
        shares = [self.strategy.part.share]
        self.run.in_window = True
        self.has_loss, self.outputs = False, {}
        started = [first] if count else []
        for position in range(1, count):
            started.append(self.start_micro_batch(next(coming)[0], index + position * stride))
            shares.append(self.strategy.part.share)
        # A hook that skips the rest of the epoch leaves fillers.
        kept = [position for position, batch in enumerate(started) if batch is not FILLER]
        self.begin_backward()
        self.joint.begin()
        self.phase[0] = LAST_BACKWARD
        losses, outputs = torch.zeros(len(kept), device=self.run.world.device), dict[int, Any]()
        if kept:
            held = [started[position] for position in kept]
            numbers = [index + position * stride for position in kept]
            self._run(held, numbers, [(weights[position], shares[position]) for position in kept], losses)
            losses, outputs = self._share(losses)
        self.flags.send(self.has_loss, self.guard.bad is not None)
        self.totals.close()
        self.strategy.reduce_gradients(parameters_of(self.optimizer))
        ended = None
        for number, position in enumerate(kept):
            if ended is not None:
                self.end_micro_batch(*ended)
            output = outputs.get(number, {"loss": losses[number]})
            ended = output, started[position], index + position * stride
        self.outputs = {}
        self._end_window(ended, consumed, index + max(count - 1, 0) * stride)
        return True

    def _share(self, losses: Tensor) -> tuple[Tensor, dict[int, Any]]:
        """Return the losses of the window, and the outputs of its steps by position, on all ranks. Collective.

        Ranks that do not log show the step values of the one that does.
        """
        computes, count = self.joint.computes_losses, losses.numel()
        shown = self.log.current() if computes else {}
        further = {}
        if self.batch_end and computes:
            further = {at: each for at, each in self.outputs.items() if each is None or each.keys() != {"loss"}}
        # As many numbers as after the window before, so that all ranks know how many.
        numbers = [torch.as_tensor(shown.get(name, 0.0)).to(losses).view(1) for name in self.shown]
        message = None
        if computes and (further or tuple(shown) != self.shown):
            message = {name: float(value) for name, value in shown.items()}, further
        values, message = self.joint.share(torch.cat([losses, *numbers]), message)
        if message is None:
            values_shown = dict(zip(self.shown, values[count:].unbind(), strict=True))
        else:
            values_shown, further = message
            self.shown = tuple(values_shown)
        losses = values[:count]
        if computes:
            return losses, self.outputs
        self.log.show(values_shown)
        self.run.latest_loss = losses[-1]
        return losses, {at: {"loss": loss} for at, loss in enumerate(losses)} | further

    def _run(self, batches: list[Any], indices: list[int], counts: list[tuple[float, float]], losses: Tensor) -> None:
        """Run the passes of the started micro-batches; write their losses into ``losses``. Collective.

        ``counts``: of each micro-batch its weight, and the share of the weight of full sequences.
        """
        forward, log, module = self.forward, self.log, self.run.module

        def step(position: int) -> Any:
            self.loss_checks.index = indices[position]
            # The batch was begun, and counted, before those that follow it.
            log.drop_batch()
            log.begin_batch(batches[position], counts[position][1])
            return forward(batches[position], indices[position])

        def finish(position: int, output: Any) -> Tensor | None:
            self.outputs[position] = outputs_for_hooks(output)
            loss = output if output.__class__ is Tensor else loss_of(output)
            if loss is None:
                self._drop_from_log()
            elif counts[position][0] != 0:
                self.has_loss = True
                self.loss_checks.note(loss)
                losses[position] = loss.detach()
            return loss

        weights = [weight for weight, _ in counts]
        # The rank that computes losses logs all values, also those that this rank sees.
        kept = None if self.joint.computes_losses else module.log_to(None)
        try:
            self.passes.run_together(self.joint, self.progress.steps_reached, batches, weights, step, finish)
        finally:
            if not self.joint.computes_losses:
                module.log_to(kept)
