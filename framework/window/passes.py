"""``Passes``: runs the forward and backward passes of windows of micro-batches, and weighs their losses.

A Trainer, ``Fabric.forward_backward`` and a rehearsal run their windows by it. The passes of a window follow in turn:

    for each micro-batch of the rank, and for each filler:
        forward
        after the first one: the total weight of the window is known; drop the gradients of the previous step
        backward

or a strategy runs them together, such as those of a pipeline.

Gradient rule: each loss is multiplied by ``weight / mean over ranks of the window's total weight``, and strategies
average gradients over ranks. The accumulated sum is then the gradient of the weighted mean over the global batch, for
windows of any length, for uneven weights and for ranks without data. ``weighted`` is the only function of phalanx that
multiplies a loss.

Example: windows of 4 micro-batches, at the end of an epoch rank 0 has 4 and rank 1 has 2, each of weight 1. The weights
of the ranks are 4 and 2, their mean is 3. Each loss is multiplied by 1/3, and the average over 2 ranks makes that 1/6:
the gradient is that of the mean over the 6 micro-batches. Where all ranks must run the same passes, rank 1 runs 2
fillers of weight 0.

Where the total is not known before the last backward pass, in ``Fabric.accumulate``, losses are multiplied by their
weights alone, and ``FabricOptimizer.prepare`` divides the gradients by the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..core.precision import LossScaler
from ..parallel.strategy import Strategy, Window, WindowPasses
from ..parallel.zero_backward import zero_gradients


def weighted(loss: Tensor, factor: float, scaler: LossScaler | None) -> Tensor:
    """Return a loss multiplied by a factor and by the loss scale."""
    if scaler is not None:
        factor *= scaler.scale
    return loss if factor == 1.0 else loss * factor


class Filler(Protocol):
    """Runs the backward passes of micro-batches that do not count, where all ranks must run the same passes."""

    def backward(self, backward: Callable[[Tensor], None], loss: Tensor | None) -> None:
        """Run ``backward`` with gradients of zero, from ``loss``, or from the loss of the filler that was run last."""


class ZeroFiller:
    """Runs backward passes from the losses of micro-batches that do not count."""

    def backward(self, backward: Callable[[Tensor], None], loss: Tensor | None) -> None:
        """Run ``backward`` with gradients of zero: zero times an infinite activation would be NaN."""
        assert loss is not None
        with zero_gradients(loss) as zero:
            backward(zero)


class WindowStep(Protocol):
    """The forward and backward passes of one window. ``position`` is the index of a pass on this rank, with fillers."""

    def forward(self, position: int) -> Tensor | None:
        """Run a forward pass; return its loss, None if there is none."""

    def begin_backward(self) -> None:
        """Prepare the first backward pass: set ``mean_weight``, drop the gradients of the previous step."""

    def backward(self, loss: Tensor | None, position: int, is_last: bool) -> None:
        """Call ``Passes.backward`` with the weight of the micro-batch, and do what belongs before and after it."""


class Passes:
    """The passes of the windows of one module.

    Args:
        strategy: sets up the module.
        scaler: the loss scale; None without one.
        backward: runs a backward pass in place of the strategy's.
        sync: sets whether the next pass reduces gradients, in place of the strategy's.
        before: hooks that are called with a weighted loss before its backward pass.
        after: hooks that are called after the backward pass of a loss that counts.
    """

    def __init__(
        self,
        strategy: Strategy,
        scaler: LossScaler | None = None,
        backward: Callable[[Tensor], None] | None = None,
        before: Sequence[Callable[[Tensor], Any]] = (),
        after: Sequence[Callable[[], Any]] = (),
        sync: Callable[[bool], None] | None = None,
    ) -> None:
        self.strategy = strategy
        self.scaler = scaler
        self.run_backward = backward or strategy.backward
        self.before, self.after = before, after
        self.sync = sync or strategy.sync_gradients
        self.filler: Filler | None = None
        """None if a rank without a loss has no backward pass, and only joins the reduction of the last one."""
        self.mean_weight = 1.0
        """The weight of the window in progress, averaged over ranks."""

    def run(self, count: int, step: WindowStep) -> None:
        """Run the passes of a window, one after another. Collective.

        Args:
            count: the number of passes of this rank, fillers included.
            step: the micro-batches, and what is done with them.
        """
        final = count - 1
        for position in range(count):
            # Each reduction costs time, so only the last backward pass has one, unless hooks see the gradients of each:
            # those of one rank are not the ones that one process would have.
            self.sync(position == final or bool(self.after))
            loss = step.forward(position)
            if position == 0:
                # Not earlier: the forward pass overlaps with the reduction of the weights, which costs a round trip
                # otherwise. Not later: they scale the losses of the backward pass.
                step.begin_backward()
            step.backward(loss, position, position == final)

    def backward(self, loss: Tensor | None, weight: float, is_last: bool) -> None:
        """Run the backward pass of a micro-batch; without a loss that counts, only its collectives. Collective."""
        if loss is not None and weight != 0:
            self.contribute(self.weighted(loss, weight))
        elif self.filler is not None:
            self.filler.backward(self.run_backward, loss)
        elif is_last and self.strategy.world.size > 1:
            self.strategy.zero_backward()

    def contribute(self, loss: Tensor) -> None:
        """Run the backward pass of a weighted loss, between its hooks. Collective."""
        for hook in self.before:
            hook(loss)
        self.run_backward(loss)
        for after in self.after:
            after()

    def run_together(
        self,
        passes: WindowPasses,
        number: int,
        batches: Sequence[Any],
        weights: Sequence[float],
        step: Callable[[int], Any],
        loss_of: Callable[[int, Any], Tensor | None],
    ) -> None:
        """Let the strategy run all passes of a window. Collective.

        Args:
            passes: those of the strategy.
            number: the number of the window.
            batches: the micro-batches; at least one.
            weights: their weights.
            step: runs the user's step on the micro-batch at a position; see ``Window``.
            loss_of: takes a position and the output of its step, and returns the loss, None if there is none.
        """

        def finish(position: int, output: Any) -> Tensor | None:
            loss, weight = loss_of(position, output), weights[position]
            return None if loss is None or weight == 0 else self.weighted(loss, weight)

        passes.run(Window(number, batches, step, finish))

    def weighted(self, loss: Tensor, weight: float) -> Tensor:
        """Return the loss of a micro-batch by the gradient rule, times the loss scale."""
        return weighted(loss, weight / self.mean_weight, self.scaler)
