"""The totals of an accumulation window over all ranks, from which the scale of its losses follows.

Before the first backward pass every rank must know the weight of the window summed over the ranks, and whether any rank
has data at all. One rank knows both at once. Several ranks launch one small reduction as soon as their windows are
fetched and read it behind the first forward pass, which hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..distributed.control import Agreement
from ..run.run import Run
from .filler_batches import FILLER, LockstepFiller


class LocalTotals:
    """The totals of a single rank."""

    def __init__(self) -> None:
        self.mean_weight = 1.0
        """The window's weight, averaged over the ranks. Each loss is multiplied by its own weight over this."""

    def open(self, batches: list[Any], weights: Sequence[float], consumed: int) -> list[Any] | None:
        """Return the micro-batches to run, or None at the end of the epoch."""
        self.mean_weight = sum(weights)
        return batches

    def wait(self) -> None:
        """Nothing to wait for: signals of a single rank are handled between two steps."""


class ReducedTotals(LocalTotals):
    """The totals of several ranks, by the control reduction of the step."""

    def __init__(self, run: Run, filler: LockstepFiller | None) -> None:
        super().__init__()
        self._run = run
        self._triggers = run.triggers
        self._size = run.world.size
        self._filler = filler
        self._is_read = False

    def open(self, batches: list[Any], weights: Sequence[float], consumed: int) -> list[Any] | None:
        """Launch the reduction; return the micro-batches to run, or None where no rank has data. Collective.

        A rank that has fewer batches than others gets fillers for the rest of its window. Where strategies or layers
        make ranks run in lockstep, each filler is a full pass of weight 0. Elsewhere a rank without any batch gets a
        single filler, which stands for its part in the reduction of gradients.
        """
        filler = self._filler
        progress = self._run.progress
        self._triggers.launch(progress.attempts, sum(weights), len(batches))
        self._is_read = False
        if not batches or (filler is not None and (len(batches) < consumed or not filler.began)):
            # How many passes to run depends on the other ranks, so this wait cannot hide behind a forward pass.
            agreement = self._read()
            if agreement.ranks_with_data == 0:
                self._handle_signals()
                return None
            missing = 1 if filler is None else filler.missing(batches, agreement, consumed)
            window = [*batches, *[FILLER] * missing]
        else:
            window = batches
        if filler is not None:
            filler.begin(batches, progress.batch_in_epoch, consumed)
        return window

    def wait(self) -> None:
        """Wait for the reduction unless it was read, and handle the signals that came with it. Collective.

        Called behind the first forward pass and before the first backward pass, on every rank.
        """
        if not self._is_read:
            self._read()
        self._handle_signals()

    def _read(self) -> Agreement:
        agreement = self._triggers.read()
        self._is_read = True
        self.mean_weight = agreement.total_weight / self._size
        return agreement

    def _handle_signals(self) -> None:
        if self._triggers.fired:
            self._run.triggers.handle()
