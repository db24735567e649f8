"""Flags that ranks agree on before every update: whether any rank had a loss, and whether one was not finite.

An update must happen on all ranks or on none, and a loss may be missing or NaN on a single rank. The ranks agree either
by a separate small message, which works under every strategy, or by flags that a strategy adds to its gradient
reduction, which saves the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..core.errors import DesyncError
from ..distributed.world import Pending, World

# Squares of marks, summed over thousands of ranks, are exact in float64.
_FACTOR, _MARK = 40_503, (1 << 20) - 1


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
        self._sent: Pending | None = None

    def reset(self) -> None:
        """Do nothing: the message of the previous window has been read."""

    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Launch the reduction. Collective."""
        self._sent = self._world.control_reduce((has_loss, nonfinite))

    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Wait for the reduction. Collective."""
        assert self._sent is not None
        with_loss, nonfinite = self._sent.wait()
        return with_loss > 0, nonfinite > 0


class RunOrder:
    """The order in which modules have run, whose collectives must match over the ranks."""

    def __init__(self) -> None:
        self.mark = 0
        """A hash, below 2**20, of the order since it was last compared."""
        self.is_sent = False
        """Whether the flags of this window hold it."""

    def note(self, number: int) -> None:
        """Note that a module runs, given by its number, the same on all ranks."""
        self.mark = (self.mark * _FACTOR + number) & _MARK

    def take(self) -> tuple[int, int]:
        """Return the sums that show whether ranks have the same order, and begin another."""
        mark, self.mark = self.mark, 0
        return mark, mark * mark

    @staticmethod
    def check(world: World, mark: float, squared: float) -> None:
        """Compare the orders of the ranks, given by the sums over them.

        Raises:
            DesyncError: they differ.
        """
        if world.size * squared != mark * mark:
            raise DesyncError(
                "the ranks have run different layers in this step, such as a layer that one of them skips, and a "
                "strategy that shards weights gathers those of each layer on all ranks at once: run the same layers on "
                "all ranks, multiplying by 0 what should not count, or use strategy='ddp_find_unused_parameters_true'."
            )


class OrderFlags(MessageFlags):
    """The flags of a step, in one message with a hash of the modules that have run."""

    def __init__(self, world: World, order: RunOrder) -> None:
        super().__init__(world)
        self._order = order

    def send(self, has_loss: bool, nonfinite: bool) -> None:
        """Launch the reduction. Collective."""
        self._order.is_sent = True
        self._sent = self._world.control_reduce((has_loss, nonfinite, *self._order.take()))

    def read(self, checks_losses: bool) -> tuple[bool, bool]:
        """Wait for the reduction. Collective.

        Raises:
            DesyncError: on all ranks; they have run different modules.
        """
        assert self._sent is not None
        with_loss, nonfinite, mark, squared = self._sent.wait()
        self._order.check(self._world, mark, squared)
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
