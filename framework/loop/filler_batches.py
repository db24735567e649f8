"""Filler batches for ranks without data or without a loss, where passes through the model contain collectives.

Some strategies gather weights in every forward pass, or reduce gradients as backward passes produce them; some layers
exchange statistics. With these, all ranks must run the same number of passes, or the job hangs. A rank whose data has
run out, or whose step returned None, runs a filler batch: a batch that returned a loss before, with weight 0. Hooks,
logs, metrics, buffers and random generators do not see it.

The gradients stay those of one process with all data. Each loss is multiplied by its weight divided by the window's
weight averaged over ranks, and ranks average their gradients. The result is the sum of weight times gradient, divided
by the total weight. A filler adds exact zeros to it (``zero_gradients``), whatever its loss.

In an evaluation, a rank that has run out of batches repeats its last batch. Ranks agree batch by batch on whether to
continue, so loaders may have any length, known or unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from ..core.errors import LoopError
from ..data.accumulation_window import Windows
from ..diagnostics.isolated_step import isolated
from ..distributed.control import Agreement
from ..distributed.user_collectives import without_values
from ..distributed.world import World
from ..parallel.fresh_batches import fresh
from ..parallel.strategy import StepFunction
from ..parallel.sync_batch_norm import is_collective, without_rows
from ..parallel.zero_backward import Calls, CallWatch, zero_gradients
from ..run.run import Run
from .step_output import loss_of

FILLER: Any = object()
"""A micro-batch of weight 0 without user data."""
# The next batch may have no loss either. Batches read ahead stay in memory, so their number beyond the window in
# progress is limited.
_MAX_LOOKAHEAD = 16
_OTHER_INDICES = 4
Numbered = tuple[int, Any]


@contextmanager
def as_filler(run: Run) -> Generator[None, None, None]:
    """Run a pass that takes part in the collectives of the others, and whose values do not count in them."""
    with run.strategy.filling(), without_rows(), without_values(run.world):
        yield


class LockstepFiller:
    """Routes the user's training step so that every micro-batch of every rank runs one forward and one backward pass.

    Args:
        run: the fit.
        transfer: moves a batch to the device; None if it is there already.
        windows: the rank's data, read ahead to find a batch with a loss.
        forward_has_collectives: whether forward passes contain collectives. If False, only backward passes do, and
            ranks may run different numbers of forward passes.
    """

    def __init__(
        self, run: Run, transfer: Callable[[Any], Any] | None, windows: Windows | None, forward_has_collectives: bool
    ) -> None:
        self._run = run
        self._filling = partial(as_filler, run)
        self._transfer = transfer
        self._windows = windows
        self._watch = CallWatch(run.module) if forward_has_collectives else None
        self._step: StepFunction
        self._last_good: tuple[Any, int] | None = None
        self._own: Any = FILLER
        """This rank's batch of the pass in progress, as it was fetched; a filler where it has none."""
        self._next = 0
        self._hides_loss = False
        """Whether the loss of the newest forward pass does not count: that of a filler, or one made for a batch of the
        user's that returned none."""
        self._ran_filler = False
        """Whether the newest forward pass was that of a filler. Its backward pass then runs as a filler too. False if a
        batch of the user's has run as usual and returned no loss: only its backward pass has a gradient of zero."""
        self.has_shared = False
        """Whether ranks without data were sent a batch, at the first window: every rank then has one to use as a
        filler."""
        self._loss: Tensor | None = None

    # ---- used by the training step ---------------------------------------------------------------------------------

    def wrap(self, step: StepFunction) -> StepFunction:
        """Return the step that the strategy routes instead of the user's step."""
        self._step = step
        return self._routed

    def hide_loss(self, routed: StepFunction) -> StepFunction:
        """Return the routed step, with output None for a filler, whose loss is retained for ``backward``."""

        def forward(batch: Any, index: int) -> Any:
            output = routed(batch, index)
            if not self._hides_loss:
                return output
            self._loss = output
            return None

        return forward

    def backward(self, backward: Callable[[Tensor], None], loss: Tensor | None) -> None:
        """Run the backward pass of a filler, with gradients of exactly zero. Collective.

        Args:
            backward: the strategy's backward pass.
            loss: a loss of weight 0, or None for the loss of the filler that was run last.
        """
        if loss is None:
            # The output as the strategy returned it: DDP and FSDP add autograd nodes to it, whose backward runs
            # collectives.
            loss, self._loss = self._loss, None
        assert loss is not None
        # Backward passes may run parts of the forward pass again.
        with self._filling() if self._ran_filler else nullcontext(), zero_gradients(loss) as zero:
            backward(zero)

    def missing(self, first: Any, count: int, agreement: Agreement, window_size: int) -> int:
        """Return the number of fillers that fill this rank's window; 0 if all ranks have the same number of batches.

        In the first window every rank calls it, and ranks without data receive a batch. After that it only computes,
        and ranks that have all micro-batches of the window do not call it.

        Args:
            first: the first of this rank's batches, or a filler.
            count: the number of them.
            agreement: the result of the control reduction.
            window_size: micro-batches in the window, the same on every rank.
        """
        if not self.has_shared:
            self._share(first, agreement)
        # If all ranks have the same number, the window is short on all of them: the epoch ends with it.
        return 0 if agreement.batches is not None else window_size - count

    def note_next_index(self, next_index: int) -> None:
        """Record the index of the first batch after the window in progress."""
        self._next = next_index

    def noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batches of a window; while a pass with one is in progress, it can become a filler."""
        for batch in batches:
            self._own = batch
            yield batch
        self._own = FILLER

    def _share(self, first: Any, agreement: Agreement) -> None:
        """Send a batch of the lowest rank that has one to ranks without. Collective, once, at the first window."""
        self.has_shared = True
        world = self._run.world
        if agreement.ranks_with_data == world.size:
            return
        has_data = first is not FILLER
        source = world.all_gather_object(has_data).index(True)
        batch = world.broadcast_object(first if world.rank == source else None, source)
        if not has_data:
            self._last_good = (batch, self._run.progress.batch_in_epoch)

    def release(self) -> None:
        """Remove the hooks from the module."""
        if self._watch is not None:
            self._watch.remove()

    # ---- runs inside the module that the strategy wraps ------------------------------------------------------------

    def _routed(self, batch: Any, index: int) -> Any:
        self._hides_loss, self._ran_filler = batch is FILLER, False
        if self._hides_loss:
            return self._fill(None, index)
        # Copied before the step, which may modify the batch's containers.
        own = fresh(self._own)
        output, loss, calls = self._run_step(batch, index)
        if loss is not None:
            self._last_good = (own, index)
            return output
        self._hides_loss = True
        if self._watch is not None and calls:
            # The forward pass has run with its collectives. A second one would hang the other ranks: use its outputs.
            return self._watch.idle_loss(calls)
        return self._fill(own, index)

    def _run_step(self, batch: Any, index: int) -> tuple[Any, Tensor | None, Calls]:
        """Run the user's step; return its output, its loss, and the calls of modules it made."""
        watch = self._watch
        if watch is None:
            output = self._step(batch, index)
            return output, loss_of(output), []
        watch.open()
        output = self._step(batch, index)
        calls = watch.close()
        loss = loss_of(output)
        if loss is not None:
            watch.learn(calls)
        return output, loss, calls

    def _fill(self, own: Any, index: int) -> Tensor:
        """Return the loss of a filler batch; ``own`` is this rank's batch without a loss, if it has any."""
        self._ran_filler = True
        with self._filling(), isolated(self._run.module), closing(self._candidates(own, index)) as candidates:
            for batch, place in candidates:
                given = fresh(batch) if self._transfer is None else self._transfer(fresh(batch))
                _, loss, calls = self._run_step(given, place)
                if loss is not None:
                    self._last_good = (batch, place)
                    return loss
                if self._watch is not None and calls:
                    return self._watch.idle_loss(calls)
        raise LoopError(
            f"training_step returned None on rank {self._run.world.rank} for every batch that could replace one "
            "without a loss, but this strategy or model requires all ranks to run the same passes: let training_step "
            "return a loss on every rank, and give batches that must not count a batch_weight of 0."
        )

    def _candidates(self, own: Any, index: int) -> Generator[tuple[Any, int], None, None]:
        """Yield candidates for the filler batch and their indices.

        The order is: the batch that returned a loss most recently, the next batches, the batch that a hook has skipped,
        and finally known batches with other indices, since a step may decide by the index whether it returns a loss.
        """
        known = [] if self._last_good is None else [self._last_good]
        yield from known
        if self._windows is not None:
            rest = max(self._next - index - 1, 0)
            with closing(self._windows.coming(index + 1)) as coming:
                yield from islice(coming, rest + _MAX_LOOKAHEAD)
        if own is None and self._own is not FILLER:
            yield self._own, index
        for batch, place in [*known, *([] if own is None else [(own, index)])]:
            yield from ((batch, place + further) for further in range(1, _OTHER_INDICES))


def in_rounds(
    batches: Iterator[Numbered], count: int | None, world: World, fill: Callable[[Any], None]
) -> Iterator[Numbered]:
    """Yield a rank's batches, then call ``fill`` with a batch as often as others have more. Collective.

    ``count`` is the number of batches of this rank, if it is certain. A rank without any batch receives one from the
    lowest rank that has one.
    """
    upcoming = next(batches, None)
    answers = world.all_gather_object((upcoming is not None, count))
    holders = [rank for rank, (holds, _) in enumerate(answers) if holds]
    if not holders:
        return
    last = upcoming[1] if upcoming is not None else None
    if len(holders) < world.size:
        shared = world.broadcast_object(last, holders[0])
        last = shared if upcoming is None else last
    counts = [count for _, count in answers if count is not None]
    rounds = max(counts) if len(counts) == world.size else None
    done = 0
    while True:
        item = upcoming
        if item is not None:
            # Before the step, which may modify the batch's containers.
            upcoming, last = next(batches, None), fresh(item[1])
        # The reduction overlaps with the model's forward pass.
        pending = world.control_reduce([upcoming is not None]) if rounds is None else None
        if item is not None:
            yield item
        else:
            fill(last)
        done += 1
        if (done == rounds) if pending is None else not any(pending.wait()):
            return


def lockstep_filler(
    run: Run, transfer: Callable[[Any], Any] | None, windows: Windows | None, reduces_each: bool
) -> LockstepFiller | None:
    """Return the source of filler batches if passes through the model contain collectives, else None.

    ``reduces_each``: each backward pass of a window reduces gradients. The other arguments are those of
    ``LockstepFiller``.
    """
    if run.strategy.window_passes is not None:
        # They take all ranks along, also those without a micro-batch.
        return None
    traits = run.strategy.traits
    forward = traits.forward_has_collectives or any(is_collective(part) for part in run.module.modules())
    if run.world.size == 1 or not (forward or traits.backward_has_collectives or reduces_each):
        return None
    return LockstepFiller(run, transfer, windows, forward)
