"""The output of ``training_step``: its loss, checks of it, and an epoch without any loss."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..core.errors import LoopError
from ..core.wording import with_article
from ..parallel.strategy import StepFunction
from ..run.run import Run

_RULE = "It must return a scalar loss, a mapping with 'loss', or None"
_SAMPLES = {
    float: " Do not call .item(): the loss must stay a tensor.",
    int: " Do not call .item(): the loss must stay a tensor.",
    tuple: " To hand on further values, return a dict of them with the key 'loss'.",
    list: " To hand on further values, return a dict of them with the key 'loss'.",
}


def named(step: Callable[..., Any] | None) -> str:
    """Return ``"training_step"``, with the file and line of the user's function if they are known."""
    code = getattr(inspect.unwrap(step), "__code__", None) if step is not None else None
    if code is None:
        return "training_step"
    return f"training_step ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def loss_of(output: Any, step: Callable[..., Any] | None = None) -> Tensor | None:
    """Return the loss; None if the step skips its batch. ``step`` is the user's function, for messages.

    Raises:
        LoopError: the loss is not a tensor, or the mapping has no loss.
    """
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and "loss" not in output:
        keys = [str(key) for key in output]
        close = difflib.get_close_matches("loss", keys, n=1)
        hint = f" Did you mean 'loss' instead of {close[0]!r}?" if close else ""
        raise LoopError(f"{named(step)} returned a mapping without 'loss' (it has {sorted(keys)}).{hint} {_RULE}.")
    if loss is not None and not isinstance(loss, Tensor):
        kind = type(loss)
        raise LoopError(f"{named(step)} returned {with_article(kind.__name__)}.{_SAMPLES.get(kind, '')} {_RULE}.")
    return loss


def check_loss(loss: Tensor, step: Callable[..., Any] | None = None) -> None:
    """Check the first loss of a run; later losses have the same shape and graph.

    Raises:
        LoopError: the loss is not a single number, or does not depend on a parameter that requires a gradient.
    """
    if loss.numel() != 1:
        raise LoopError(f"{named(step)} returned a loss of shape {tuple(loss.shape)}. {_RULE}: take its mean().")
    if not loss.requires_grad:
        raise LoopError(
            f"{named(step)} returned a loss that does not depend on any parameter, so there is nothing to train. "
            "Compute it from the module's output without detach(), item() or no_grad(), and check that parameters "
            "require gradients."
        )


def outputs_for_hooks(output: Any) -> Any:
    """Return the output without its graph."""
    if output.__class__ is Tensor:
        return {"loss": output.detach()}
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output


def no_manual_backward(*args: Any, **kwargs: Any) -> None:
    """Refuse ``manual_backward`` under automatic optimization.

    Raises:
        LoopError: always.
    """
    raise LoopError(
        "manual_backward was called in a module with automatic optimization, where phalanx calls backward on the loss "
        "that training_step returns: set self.automatic_optimization = False in __init__, and step the optimizers in "
        "training_step, or leave the call out."
    )


class LossWatch:
    """The losses of a fit under automatic optimization: checks the first one, and refuses an epoch without any.

    The first loss is checked as the user's step returned it. A strategy may wrap the step in functions that add a graph
    to its output, so that a detached loss could no longer be recognized.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seen = False
        """Whether the step of this rank has returned a loss."""
        self.missing = 0
        """Optimizer steps of this fit in which no rank had a loss; the same on every rank."""
        self._was_noted = False

    def watched(self, step: StepFunction) -> StepFunction:
        """Return ``step``, which checks its output until the first loss."""
        if self.seen:
            return step

        def checked(*args: Any) -> Any:
            output = step(*args)
            if not self.seen:
                own = self._run.module.training_step
                loss = loss_of(output, own)
                if loss is not None:
                    check_loss(loss, own)
                    self.seen = True
            return output

        return checked

    def count_missing(self, skipped: bool) -> None:
        """Count an optimizer step in which no rank had a loss; ``skipped``: a hook has skipped the batch."""
        self.missing += 1
        if not (skipped or self.seen or self._was_noted):
            self._was_noted = True
            self._run.note(
                f"{named(self._run.module.training_step)} returned None, so the weights were not updated. If it does "
                "so to skip this batch, all is well; otherwise let it return the loss."
            )

    def check_epoch(self, num_steps: int) -> None:
        """Refuse a run without any loss at the end of an epoch of ``num_steps`` optimizer steps. Collective then.

        A run of a single step is accepted: a module may skip its first batch.

        Raises:
            LoopError: on all ranks.
        """
        run = self._run
        # The ranks have agreed on the number of steps without a loss, so all of them get here, or none.
        if self.missing < max(2, num_steps) or run.progress.global_step:
            return
        if not any(run.world.all_gather_object(self.seen)):
            raise LoopError(
                f"{named(run.module.training_step)} returned None for every batch, and epoch {run.progress.epoch} "
                "has ended, so nothing was trained: let it return the loss."
            )
