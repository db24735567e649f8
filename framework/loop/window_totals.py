"""Totals of an accumulation window over all ranks, which determine the scale of its losses.

Before the first backward pass every rank must know the weight of the window summed over the ranks, and whether any rank
has data at all. A single rank knows both immediately. Several ranks launch one small reduction as soon as they know
their own weights, and read it after the first forward pass, which overlaps with it. The signals that it announces are
exchanged and handled after the last backward pass.

Where the reduction of a window shows that the data of all ranks assures the next one too, the weight of the next one is
known without its own reduction, which is then read after the last backward pass. Ranks that wait for one another before
the backward pass and again in the reduction of gradients lose the time by which they are late at each: 5 % of a step of
1 ms on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import DesyncError
from ..core.wording import counted
from ..data.accumulation_window import Windows
from ..distributed.control import Agreement
from ..run.run import Run
from .filler_batches import LockstepFiller

_WAITS_EVERY, _WAITS_AT = 8, 5
"""In one of so many steps ranks wait for one another before the backward pass, which shows how long they wait.

It is not the step after a multiple of 8: validations and saves, which hold up a rank, are due at such numbers.
"""


class LocalTotals:
    """The totals of a single rank."""

    def __init__(self) -> None:
        self.mean_weight = 1.0
        """The window's weight, averaged over ranks. Each loss is multiplied by its own weight divided by this value.

        Until the reduction is read, the weight on this rank alone: it is the same where all micro-batches are assured.
        """

    def open(self, first: Any, weights: Sequence[float], window_size: int) -> int:
        """Return the number of passes to run, 0 at the end of the epoch.

        Args:
            first: this rank's first micro-batch, or a filler.
            weights: one for each of this rank's micro-batches; fewer than ``window_size``, or none, where its data has
                run out.
            window_size: micro-batches in the window, the same on every rank.
        """
        self.mean_weight = sum(weights)
        return len(weights)

    def wait(self) -> None:
        """Do nothing: the totals of a single rank are known."""

    def close(self) -> None:
        """Do nothing: signals of a single rank are handled between two steps."""


class ReducedTotals(LocalTotals):
    """The totals of several ranks, read from the control reduction of the step.

    Args:
        run: the fit.
        filler: runs passes on ranks without data; None if they run none.
        windows: where the windows come from, if all micro-batches have the weight 1; else None.
    """

    def __init__(self, run: Run, filler: LockstepFiller | None, windows: Windows | None) -> None:
        super().__init__()
        self._run = run
        self._triggers = run.triggers
        self._size = run.world.size
        self._filler = filler
        self._windows = windows
        self._assured = -1, 0
        """An epoch, and the number of its micro-batches that every rank certainly has."""
        self._next_assured = -1, 0
        """The value of ``_assured`` from the end of this window on, if all ranks have the micro-batches of another."""
        self._is_known = False
        """Whether the weight of this window is known without its reduction: all its micro-batches are assured."""
        self._reads_late = False
        """Whether the reduction of this window is read after the last backward pass."""
        self._window_size = 1
        """Micro-batches of this window on a rank that has data for all of them."""
        self._agreement: Agreement | None = None
        """The result of the reduction of this window; None before it is read."""
        self._is_exchanged = False

    def open(self, first: Any, weights: Sequence[float], window_size: int) -> int:
        """Launch the reduction; return the number of passes to run, 0 if no rank has data, or to stop. Collective.

        If the strategy or a layer requires lockstep, and the ranks have different numbers of batches, each rank fills
        its window up to ``window_size`` with fillers, which are full passes of weight 0: for a window of 2, of which
        rank 0 has 1 batch and rank 1 none, rank 0 gets 1 filler and rank 1 gets 2. Otherwise only a rank without any
        batch gets one filler, which only takes part in the reduction of gradients. Fillers follow the rank's own
        batches.

        Args:
            first: this rank's first micro-batch, or a filler.
            weights: one for each of this rank's micro-batches; fewer than ``window_size``, or none, where its data has
                run out.
            window_size: micro-batches in the window, the same on every rank.

        Raises:
            DesyncError: on all ranks; they are at different optimizer steps.
        """
        filler, count = self._filler, len(weights)
        progress = self._run.progress
        epoch, assured = self._assured
        self._is_known = is_known = epoch == progress.epoch and progress.batch_in_epoch + window_size <= assured
        self._reads_late = is_known and progress.steps_reached % _WAITS_EVERY != _WAITS_AT
        self._next_assured = progress.epoch, progress.batch_in_epoch + 2 * window_size
        assures_next = self._windows is not None and self._windows.assures(2 * window_size)
        self.mean_weight = sum(weights)
        has_raised = self._triggers.launch(progress.steps_reached, self.mean_weight, count, assures_next, window_size)
        self._agreement, self._is_exchanged, self._window_size = None, False, window_size
        num_passes = count
        if has_raised and self._stops():
            return 0
        if not count or (filler is not None and (count < window_size or not filler.has_shared)):
            # The number of passes depends on the other ranks, so this wait cannot overlap with a forward pass. Only
            # some ranks read here, while others may be in a forward pass: no other collective may follow. Except in
            # the first window, in which every rank with a source of fillers comes here: ``missing`` shares a batch.
            agreement = self._read()
            if agreement.ranks_with_data == 0:
                # Every rank is here.
                self.wait()
                self.close()
                return 0
            num_passes += 1 if filler is None else filler.missing(first, count, agreement, window_size)
        if filler is not None:
            filler.note_next_index(progress.batch_in_epoch + window_size)
        return num_passes

    def wait(self) -> None:
        """Wait for the reduction if it was not read yet, unless it is read late. Collective.

        Every rank calls it after the first forward pass and before the first backward pass.

        Raises:
            DesyncError: the ranks are at different optimizer steps.
        """
        if self._reads_late:
            self._triggers.pace.arrived()
            return
        self._read()
        self._triggers.check_step(is_alone=self._is_known)

    def close(self) -> None:
        """Exchange triggers if a rank has raised one, and handle signals. Collective.

        Every rank calls it after its last backward pass and before the update. Passes may contain collectives, and
        ranks that differ in their data run different passes before ``wait``. So this is the first point that all ranks
        reach after the same collectives.

        Raises:
            DesyncError: the ranks are at different optimizer steps, or have run windows of different lengths.
        """
        if not self._is_exchanged:
            if self._reads_late:
                self._read()
                self._triggers.check_step(is_alone=True)
            self._triggers.exchange()
        self._is_exchanged = True
        if self._triggers.fired:
            self._triggers.handle()

    def _stops(self) -> bool:
        """Whether all ranks have requested a stop after the previous window, so this one is left out. Collective then.

        Where only some ranks have raised a trigger, the others learn of it in this window.
        """
        if not self._read().all_raised:
            return False
        # Every rank is here.
        self.wait()
        self.close()
        return self._run.stops_before_step()

    def _read(self) -> Agreement:
        if self._agreement is None:
            if not self._reads_late:
                self._triggers.pace.arrived()
            # In how many of such steps a rank waits here.
            share = 0.0 if self._reads_late else 1 / _WAITS_EVERY if self._is_known else 1.0
            self._agreement = agreement = self._triggers.agreement(share)
            # The same condition on all ranks.
            if not agreement.has_one_size:
                raise DesyncError(
                    f"this rank {self._run.world.rank} accumulates {counted(self._window_size, 'micro-batch')} for "
                    f"an optimizer step, and the mean of all ranks is {agreement.mean_size:g}: every rank must use the "
                    "same accumulate_grad_batches."
                )
            self.mean_weight = agreement.total_weight / self._size
            self._assured = self._next_assured if agreement.assures_next else (-1, 0)
        return self._agreement
