"""``WindowPasses``: the passes of an accumulation window, where a strategy runs them together instead of one by one.

A pipeline works on several micro-batches at a time, and divides the model over ranks: only some of them see the output
of the user's step. The training loop prepares the micro-batches of a window, hands them over, and updates afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.arguments import NoArguments


@dataclass(frozen=True)
class Window:
    """The micro-batches of this rank in one accumulation window."""

    number: int
    """The number of the window since the start of training, the same on all ranks and after a resumption."""
    batches: Sequence[Any]
    """The micro-batches, on the device; at least one."""
    step: Callable[[int], Any]
    """Runs the user's step on the micro-batch at a position, and returns its output. It may run several times."""
    finish: Callable[[int, Any], Tensor | None]
    """Takes the position of a micro-batch and the output of its step, and returns the loss for the backward pass,
    weighted and scaled; None if the micro-batch has none. It is called once for each position, on the ranks with
    ``computes_losses``, in any order."""


class WindowPasses(NoArguments, ABC):
    """Runs the forward and backward passes of windows; base class. Gradients add up in ``parameter.grad``."""

    computes_losses: bool = True
    """Whether this rank sees the outputs of the user's step. Known after ``Strategy.setup``."""

    def remark(self, sizes: Sequence[int], what: str) -> str | None:
        """Return a sentence on windows that leave ranks idle, to be shown once at the start of a fit; None without any.

        Args:
            sizes: the numbers of micro-batches that windows have.
            what: the argument that gives them.
        """
        return None

    def begin(self) -> None:
        """Prepare for the passes of a window; called on all ranks, also those without a micro-batch. Collective."""

    @abstractmethod
    def run(self, window: Window) -> None:
        """Run all passes of a window, without a reduction over ranks that read other data. Collective.

        Only ranks that read the same data take part; they have the same window.
        """

    @abstractmethod
    def share(self, values: Tensor, message: Any = None) -> tuple[Tensor, Any]:
        """Return values and a message of the rank that computes losses, on those that read the same data. Collective.

        Called after ``run``. What the user's steps kept in attributes on that rank is given to the others too.

        Args:
            values: numbers; on the other ranks a tensor of the same shape and dtype.
            message: any object that can be pickled; None, which costs nothing, on the other ranks.
        """
