"""``Recovery``: operations of a strategy for windows that are repeated when a rank has run out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..core.arguments import NoArguments

Repeat = Callable[[Optimizer, Callable[[], Any]], Any]
"""Calls a function that steps an optimizer, a second time if it ran out of memory before it had changed anything."""


class Recovery(NoArguments):
    """Base class, for strategies whose passes and updates contain no collective after a set-up for ``REPEATED``."""

    def begin_pass(self) -> None:
        """Begin the forward and backward pass of a micro-batch."""

    def end_pass(self) -> None:
        """End a pass that had enough memory on this rank."""

    def join(self) -> None:
        """Call the collectives of a pass that this rank has not called since it ran out of memory. Collective.

        It is called in place of ``end_pass``, and for every pass that follows in the window.
        """

    def end_window(self) -> None:
        """Note that no rank has run out of memory in the window. On all ranks."""

    def refresh(self) -> None:
        """Note that the passes may change from now on. On all ranks."""

    def update(self, optimizer: Optimizer, step: Callable[[], bool], repeat: Repeat) -> bool:
        """Apply an update; repeat the part of it that contains no collective. Collective.

        Args:
            optimizer: the user's optimizer.
            step: applies the update, and returns whether it was applied.
            repeat: see ``Repeat``.
        """
        return bool(repeat(optimizer, step))
