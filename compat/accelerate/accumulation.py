"""Gradient accumulation of an ``Accelerator``, with or without ``accumulate``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...framework.fabric.fabric import Fabric


class Accumulation:
    """The backward pass, and the number of micro-batches of an update."""

    fabric: Fabric

    # `self` is positional-only, as in Fabric: an option may be named `self`.
    def backward(self, /, loss: Tensor, **options: Any) -> None:
        """Compute gradients. Collective; see ``Fabric.backward``.

        Outside ``accumulate`` the loss is divided by ``gradient_accumulation_steps``, so that the gradients of that
        many calls add up to their mean.
        """
        if not self.fabric.is_accumulating and self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        self.fabric.backward(loss, **options)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of an update. It may be set between two updates."""
        return self.fabric.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.fabric.set_accumulation(steps)
