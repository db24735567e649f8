"""Flags that ranks agree on before every update: whether any rank had a loss, and whether one was not finite.

An update must happen on all ranks or on none, and a loss may be missing or NaN on a single rank. The ranks agree either
by a separate small message, which works under every strategy, or by flags that a strategy adds to its gradient
reduction, which saves the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..distributed.world import Pending, World


class StepFlags(ABC):
    """Exchange of the two flags of an optimizer step. All methods are called once a step, in this order."""

    @abstractmethod
    def reset(self) -> None:
        """Start a window: no rank has had a loss. Called where the gradients are dropped."""

    @abstractmethod
    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Start to exchange this rank's flags. Called right before the window's last backward pass. Collective."""

    @abstractmethod
    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Return whether any rank had a loss, and whether a loss of any rank was not finite. Collective.

        Called after the window's last backward pass. Without ``checks_losses`` no rank ever sends ``nonfinite``, so an
        implementation need not synchronize with the device.
        """


class MessageFlags(StepFlags):
    """A reduction of two numbers, launched before the last backward pass, which hides it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: tuple[Tensor, Pending] | None = None

    def reset(self) -> None:
        """Do nothing: the message of the previous window has been read."""

    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Launch the reduction. Collective."""
        flags = torch.tensor((has_loss, nonfinite), dtype=torch.float64)
        self._sent = flags, self._world.control_reduce(flags)

    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Wait for the reduction. Collective."""
        assert self._sent is not None
        flags, pending = self._sent
        pending.wait()
        with_loss, nonfinite = flags.tolist()
        return with_loss > 0, nonfinite > 0


class LocalFlags(StepFlags):
    """The flags of a single rank: no communication is needed."""

    def __init__(self) -> None:
        self._flags = (False, False)

    def reset(self) -> None:
        """Do nothing."""

    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Record the flags."""
        self._flags = has_loss, nonfinite

    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Return this rank's flags."""
        return self._flags
