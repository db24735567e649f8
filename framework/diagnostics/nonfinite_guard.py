"""Losses and gradients that are NaN or infinite: seen by all ranks in the step where they appear, before its update.

A rank's loss is looked at where it is read anyway, on a CPU. That it is not finite travels with what is exchanged in
the step in any case: the flag that ``ddp`` reduces with the gradients, the message of strategies that ask whether any
rank had a loss. Gradients are looked at before the update, in one pass. What is found is told by all ranks alike, so
only then do they exchange more: who it was, where it began, and which batch it was.

On CUDA ``raise`` waits for nothing: numbers are copied in the background and come a step or two late.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..core.errors import NonFiniteError, PhalanxError
from .batch_dump import keep_batch
from .nonfinite_search import first_gradient, first_module, first_weight, in_batch, local_gradient

if TYPE_CHECKING:
    from ..parallel.strategy import StepFunction
    from ..run.run import Run

FOLDER = "nonfinite"
IN_A_ROW = 10
IN_ALL = 100
SHARE_OF_ALL = 0.01
_MOST_KEPT = 4
_ADVICE = (
    "Lower the learning rate or clip gradients; Trainer(nonfinite='skip') leaves such updates out, 'ignore' goes on."
)


@dataclass(frozen=True)
class Seen:
    """A micro-batch of this rank: its loss, where it has one that is not finite, its data, its index in the epoch."""

    loss: float | None
    batch: Any
    index: int


@dataclass(frozen=True)
class Finding:
    """What a rank tells the others."""

    at_fault: bool
    loss: float | None
    index: int
    began: str
    kept: str


def _nothing() -> Seen:
    return Seen(None, None, 0)


class NonFiniteGuard:
    """One fit's policy: ``"raise"``, ``"skip"`` or ``"ignore"``."""

    def __init__(self, run: Run, policy: str) -> None:
        self.run = run
        self.policy = policy
        self.bad: Seen | None = None
        """This rank's first loss since the last update that is not finite."""
        self.in_a_row = 0
        """Updates left out since the last that was applied."""
        self.skipped = 0
        self.rerun: Callable[[], StepFunction] | None = None
        """Gives the user's step as it can be run once more, without a backward pass after it."""
        self.newest: Callable[[], Seen] = _nothing
        """Gives this rank's micro-batch in progress."""
        self._kept = 0
        on_host = run.world.device.type == "cpu"
        # A strategy that scales losses itself also skips the updates that its scale makes overflow.
        owned = run.fabric.strategy_scales_losses
        self.sees_losses = policy != "ignore" and on_host
        sees_gradients = not owned and (policy == "skip" or (policy == "raise" and on_host))
        updater = run.fabric.updater
        updater.guard(policy == "skip" and not owned, self.heed_gradients if sees_gradients else None)

    def see(self, loss: float, batch: Any, index: int) -> None:
        """Take note of a loss of this rank that is not finite. In one process ``raise`` acts at once."""
        if self.bad is None:
            self.bad = Seen(loss, batch, index)
        if self.policy == "raise" and self.run.world.size == 1:
            self.heed_loss()

    def applied(self) -> None:
        """Record that an update was applied."""
        self.in_a_row = 0

    def agree(self) -> bool:
        """Whether any rank met a loss that is not finite, where nothing else tells: one small message. Collective."""
        if self.run.world.size == 1 or not self.sees_losses:
            return self.bad is not None
        bad = torch.tensor([float(self.bad is not None)], dtype=torch.float64)
        self.run.world.control_reduce(bad).wait()
        return bad.item() > 0

    def heed_loss(self) -> None:
        """Stop, or count the update as left out, for a loss that is not finite on some rank. Collective.

        Raises:
            NonFiniteError: on all ranks; the policy is ``raise``, or too many updates were left out.
        """
        self._heed(None)

    def heed_gradients(self, optimizer: Optimizer) -> None:
        """Do the same for gradients of losses that are finite. Collective."""
        self._heed(optimizer)

    def _heed(self, optimizer: Optimizer | None) -> None:
        what = self._describe(self._findings(optimizer), of_loss=optimizer is None)
        self.bad = None
        if self.policy == "raise":
            raise NonFiniteError(f"{what} {_ADVICE}")
        self.in_a_row += 1
        self.skipped += 1
        if self.in_a_row >= IN_A_ROW:
            raise NonFiniteError(f"{what} That is the {self.in_a_row}th update in a row that was left out. {_ADVICE}")
        if self.skipped > max(IN_ALL, SHARE_OF_ALL * self.run.progress.attempts):
            raise NonFiniteError(
                f"{what} With it {self.skipped} of {self.run.progress.attempts + 1} updates were left out: more than "
                f"{IN_ALL} and {SHARE_OF_ALL:.0%}. {_ADVICE}"
            )
        if self.skipped & (self.skipped - 1) == 0:
            self.run.trainer.note(f"An update was left out ({self.skipped} so far): {what}")

    # ---- what is told ---------------------------------------------------------------------------------------------

    def _findings(self, optimizer: Optimizer | None) -> list[Finding]:
        """Return what each rank knows of it. Collective."""
        run = self.run
        seen = self.bad or self.newest()
        began = ""
        at_fault = self.bad is not None
        if self.policy == "raise":
            began = first_weight(run) or ("" if optimizer is None else first_gradient(run))
            at_fault = self._search_gradient(seen) if optimizer is not None else at_fault
            if not began:
                began = self._search_module(seen) if optimizer is None else ""
        kept = self._keep(seen, began) if at_fault or optimizer is not None else ""
        return run.world.all_gather_object(Finding(at_fault, seen.loss, seen.index, began, kept))

    def _search_module(self, seen: Seen) -> str:
        """Run each rank's batch once more, all ranks together: the step may hold collectives. Collective."""
        ready = self.rerun is not None and seen.batch is not None
        if not all(self.run.world.all_gather_object(ready)):
            return ""
        assert self.rerun is not None
        nan = in_batch(seen.batch)
        return first_module(self.run, self.rerun(), seen.batch, seen.index) if nan is None else nan

    def _search_gradient(self, seen: Seen) -> bool:
        """Return whether this rank's own gradients are not finite, where a rank can tell by itself. Collective."""
        traits = self.run.fabric.strategy.traits
        tells = traits.replicates and not traits.forward_has_collectives and not traits.backward_has_collectives
        ready = tells and self.rerun is not None and seen.batch is not None
        if not all(self.run.world.all_gather_object(ready)):
            return False
        assert self.rerun is not None
        return not local_gradient(self.run, self.rerun(), seen.batch, seen.index)

    def _keep(self, seen: Seen, began: str) -> str:
        """Write the batch into the run's directory, where the run has one; return where, or why not."""
        run, progress = self.run, self.run.progress
        if seen.batch is None or not run.trainer.writes or self._kept >= _MOST_KEPT:
            return ""
        self._kept += 1
        facts = {
            "optimizer_step": progress.global_step,
            "epoch": progress.epoch,
            "batch_in_epoch": seen.index,
            "rank": run.world.rank,
            "loss": None if seen.loss is None else repr(seen.loss),
            "began": began,
        }
        name = f"step={progress.global_step}-rank={run.world.rank}"
        try:
            return str(keep_batch(run.trainer.run_dir / FOLDER, name, seen.batch, facts))
        except PhalanxError as error:
            with suppress(Exception):
                run.trainer.note(f"The batch was not kept: {error}")
            return ""

    def _describe(self, findings: list[Finding], of_loss: bool) -> str:
        progress = self.run.progress
        rank = next((rank for rank, found in enumerate(findings) if found.at_fault), None)
        found = findings[rank or 0]
        what = f"the loss is {found.loss}" if of_loss else "the loss is finite and its gradient is not"
        on = f" on rank {rank}" if len(findings) > 1 and rank is not None else ""
        also = [str(other) for other, one in enumerate(findings) if one.at_fault and other != rank]
        on += f" (and {', '.join(also)})" if also else ""
        began = f": {found.began}" if found.began else ""
        kept = next((f" The batch is kept in {one.kept}." for one in [found, *findings] if one.kept), "")
        return (
            f"{what} at optimizer step {progress.global_step} (epoch {progress.epoch}, batch {found.index}){on}"
            f"{began}.{kept}"
        )
