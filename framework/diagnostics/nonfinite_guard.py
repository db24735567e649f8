"""Non-finite losses and gradients (NaN, Inf): what is checked, when, and the policy for what is found.

The policy and the device decide what is checked (``checks_of``):

    policy, device    loss                                     gradient
    raise, CPU        in its step, before the update           before the update
    raise, CUDA       a copy of it, one or two steps later     not checked
    skip, CPU         in its step, before the update           before the update
    skip, CUDA        not checked; its gradient is             before the update
    ignore            not checked                              not checked

With a loss scale ``Updater`` checks gradients before each update in any case, and skips those that the scale made
overflow. A strategy that scales losses itself checks gradients itself, and this file does not.

- On a CPU, losses are read anyway. A non-finite loss needs no message of its own: it is part of a message that the step
  exchanges in any case, in which ranks report whether they had a loss. Where the check precedes the update, the weights
  are still good.
- On CUDA, reading a loss or the result of a check would make the host wait for the device. ``raise`` never does:
  losses are copied in the background. By then weights may have been updated from them, so a run resumes from its newest
  checkpoint. ``skip`` waits, once in each step.
- Gradients are checked in one pass over memory.
- Once a non-finite value is found, all ranks know of it at the same point of a step. Only then do they exchange more:
  the rank, the source and the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from ..core.errors import NonFiniteError, PhalanxError
from ..parallel.strategy import StepFunction
from ..run.run import Run
from .batch_dump import keep_batch
from .nonfinite_search import first_gradient, first_module, first_weight, in_batch, local_gradient

FOLDER = "nonfinite"
IN_A_ROW = 10
IN_ALL = 100
SHARE_OF_ALL = 0.01
_MOST_KEPT = 4
_ADVICE = "Lower the learning rate or clip gradients. Trainer(nonfinite='skip') skips such updates; 'ignore' continues."


@dataclass(frozen=True)
class Checks:
    """The values that are checked in a fit."""

    losses: bool
    """Each loss in its step."""
    copied_losses: bool
    """Copies of losses, one or two steps later."""
    gradients: bool
    """Gradients before each update."""


def checks_of(policy: str, device_type: str, strategy_scales_losses: bool) -> Checks:
    """Return what is checked under a policy; see the table at the head of this file."""
    # Where the losses of a step are not copied in the background, they are read at once.
    at_once = device_type != "cuda"
    return Checks(
        losses=policy != "ignore" and at_once,
        copied_losses=policy == "raise" and device_type == "cuda",
        gradients=not strategy_scales_losses and (policy == "skip" or (policy == "raise" and at_once)),
    )


@dataclass(frozen=True)
class Seen:
    """A micro-batch of this rank: its loss if that is non-finite, its data, and its index in the epoch."""

    loss: float | None
    batch: Any
    index: int


@dataclass(frozen=True)
class Finding:
    """Report of one rank to the others."""

    at_fault: bool
    loss: float | None
    index: int
    began: str
    kept: str


def _nothing() -> Seen:
    return Seen(None, None, 0)


class NonFiniteGuard:
    """Applies the policy of one fit: ``"raise"``, ``"skip"`` or ``"ignore"``."""

    def __init__(
        self,
        run: Run,
        policy: str,
        rerun: Callable[[], StepFunction] | None = None,
        newest: Callable[[], Seen] | None = None,
    ) -> None:
        self.run = run
        self.policy = policy
        self.bad: Seen | None = None
        """First non-finite loss of this rank since the last update."""
        self.waits = False
        """Whether a loss is handled after the passes of its window, in one process too."""
        self.in_a_row = 0
        """Number of consecutive skipped updates; an update that is applied resets it to 0."""
        self.skipped = 0
        self.rerun = rerun
        """Returns the user's step in a form that can be run again without a backward pass."""
        self.newest = newest or _nothing
        """Returns the current micro-batch of this rank."""
        self._kept = 0
        self.checks = checks_of(policy, run.device_type, run.fabric.strategy_scales_losses)
        handler = self.handle_gradients if self.checks.gradients else None
        run.updater.guard(self.checks.gradients and policy == "skip", handler)

    def see(self, loss: float, batch: Any, index: int) -> None:
        """Record a non-finite loss of this rank. In one process, ``raise`` raises immediately."""
        if self.bad is None:
            self.bad = Seen(loss, batch, index)
        if self.policy == "raise" and self.run.world.size == 1 and not self.waits:
            self.handle_loss()

    def is_any_loss_bad(self) -> bool:
        """Whether any rank had a non-finite loss, for steps without another message that reports it. Collective."""
        if self.run.world.size == 1 or not self.checks.losses:
            return self.bad is not None
        (bad,) = self.run.world.control_reduce([self.bad is not None]).wait()
        return bad > 0

    def handle_loss(self) -> None:
        """Apply the policy to a non-finite loss on some rank: raise, or count a skipped update. Collective.

        Raises:
            NonFiniteError: On all ranks, if the policy is ``raise`` or too many updates have been skipped.
        """
        self._handle(None)

    def handle_gradients(self, optimizer: Optimizer) -> None:
        """Apply the policy to non-finite gradients of finite losses, like ``handle_loss``. Collective."""
        self._handle(optimizer)

    def _handle(self, optimizer: Optimizer | None) -> None:
        what = self._describe(self._findings(optimizer), of_loss=optimizer is None)
        self.bad = None
        if self.policy == "raise":
            raise NonFiniteError(f"{what} {_ADVICE}")
        self.in_a_row += 1
        self.skipped += 1
        if self.in_a_row >= IN_A_ROW:
            raise NonFiniteError(f"{what} This is the {self.in_a_row}th skipped update in a row. {_ADVICE}")
        steps_before = self.run.progress.steps_reached
        if self.skipped > max(IN_ALL, SHARE_OF_ALL * steps_before):
            raise NonFiniteError(
                f"{what} Now {self.skipped} of {steps_before + 1} updates have been skipped: more than {IN_ALL} and "
                f"more than {SHARE_OF_ALL:.0%}. {_ADVICE}"
            )
        if self.skipped & (self.skipped - 1) == 0:
            self.run.note(f"An update was left out ({self.skipped} so far): {what}")

    # ---- the message ----------------------------------------------------------------------------------------------

    def _findings(self, optimizer: Optimizer | None) -> list[Finding]:
        """Search for the source, save the batch, and return the findings of every rank. Collective."""
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
        """Return the tensor of the batch that is NaN, else the first non-finite module output, or nothing. Collective.

        If a batch does not explain the loss of its rank, every rank runs its own batch again, since the step may
        contain collectives.
        """
        ready, at_fault = self.rerun is not None and seen.batch is not None, self.bad is not None
        nan = in_batch(seen.batch) if ready and at_fault else None
        answers = self.run.world.all_gather_object((ready, at_fault and nan is None))
        if not all(one for one, _ in answers) or not any(searches for _, searches in answers):
            return nan or ""
        assert self.rerun is not None
        found = first_module(self.run, self.rerun(), seen.batch, seen.index)
        return nan or found

    def _search_gradient(self, seen: Seen) -> bool:
        """Return whether the local gradients of this rank are non-finite. Collective.

        Return False where the ranks' gradients cannot be distinguished, or the step cannot be run again.
        """
        traits = self.run.traits
        distinguishes = traits.replicates and not traits.forward_has_collectives and not traits.backward_has_collectives
        ready = distinguishes and self.rerun is not None and seen.batch is not None
        if not all(self.run.world.all_gather_object(ready)):
            return False
        assert self.rerun is not None
        return not local_gradient(self.run, self.rerun(), seen.batch, seen.index)

    def _keep(self, seen: Seen, began: str) -> str:
        """Write the batch into the run's directory, if there is one; return its path, or the reason for not writing."""
        run, progress = self.run, self.run.progress
        if seen.batch is None or not run.context.writes or self._kept >= _MOST_KEPT:
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
            return str(keep_batch(run.directory.path / FOLDER, name, seen.batch, facts))
        except PhalanxError as error:
            with suppress(Exception):
                run.note(f"The batch was not kept: {error}")
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
        kept = next((f" The batch is saved in {one.kept}." for one in [found, *findings] if one.kept), "")
        return (
            f"{what} at optimizer step {progress.global_step} (epoch {progress.epoch}, batch {found.index}){on}"
            f"{began}.{kept}"
        )
