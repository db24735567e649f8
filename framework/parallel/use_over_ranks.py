"""Which parameters no rank has used in a window: optimizers leave those out, and only those.

A rank knows which parameters its own passes have used. Where gradients are averaged for all parameters, one that this
rank has not used may have a gradient of another rank. The exchange costs a message, so ranks make it in the first
windows and at intervals, and in each window once one of them had an unused parameter.
"""

from __future__ import annotations

from collections.abc import Collection

from ..distributed.world import World
from .zero_backward import runs_zero_backward

_FIRST, _EVERY = 3, 64


class UseOverRanks:
    """The exchange of used parameters, which are given by numbers.

    Args:
        world: the ranks.
        count: the number of parameters.
    """

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._count = count
        self._windows = 0
        self._is_uneven = False

    @property
    def exchanges(self) -> bool:
        """Whether the next call of ``unused`` is an exchange; the same on all ranks."""
        return self._is_uneven or self._windows < _FIRST or self._windows % _EVERY == 0

    def counts_pass(self) -> bool:
        """Return whether the parameters count as used that the backward pass now computes a gradient of.

        Those of a pass of gradients of zero alone do not, in a window at whose end ranks exchange what they have used.
        Else it is not known which ones the others use, and those of the last batch that this rank had are likely.
        """
        return not (runs_zero_backward() and self.exchanges)

    def unused(self, missing: Collection[int]) -> set[int] | None:
        """End a window; return the parameters that no rank has used, None if this window has no exchange. Collective.

        Args:
            missing: those that this rank has not used.
        """
        exchanges = self.exchanges
        self._windows += 1
        if not exchanges:
            return None
        used = [1.0] * self._count
        for number in missing:
            used[number] = 0.0
        # A rank without a loss says nothing about the model.
        *counts, ranks = self._world.control_reduce([*used, len(missing) < self._count]).wait()
        self._is_uneven = self._is_uneven or min(counts, default=ranks) < ranks
        return {number for number, count in enumerate(counts) if not count}
