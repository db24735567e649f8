"""Random numbers in a pipeline.

Code before the first block runs on every stage and must draw the same numbers there: noise that is added to the input
on the first stage may be the target on the last one. It draws from the generators that all ranks of a pipeline share.
The blocks, and what follows them, draw from generators that are seeded for each pass from the state of the shared ones,
the window, the micro-batch and the stage. So they differ between stages and micro-batches, have no state of their own,
and continue exactly after a resumption.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ...framework.core.position_rng import mix_seed
from ...framework.distributed.seed import Generators, capture, restore, seed_rank
from ...framework.distributed.world import World


class SharedDraws:
    """The shared generators during the passes of one window.

    Args:
        device: the device of this rank.
        number: the number of the window.
        repeats: whether a micro-batch has several passes on this rank.
    """

    def __init__(self, device: torch.device, number: int, repeats: bool) -> None:
        self._device = device
        self._number = number
        self._repeats = repeats
        self._before: dict[int, Generators] = {}
        self._shared: Generators | None = None
        self._left = 0
        self._place = (0, 0)

    @contextmanager
    def micro_batch(self, position: int, stage: int) -> Generator[None, None, None]:
        """Draw as every pass of a micro-batch does; afterwards, the generators are where its first pass left them."""
        before = self._before.get(position)
        later = None if before is None else Generators()
        if before is not None:
            before.put_back()
        elif self._repeats:
            self._before[position] = Generators()
        self._shared, self._place = None, (position, stage)
        try:
            yield
        finally:
            after = later or self._shared
            if after is not None:
                after.put_back()

    def leave(self) -> None:
        """Draw other numbers than the other stages until the pass ends, or ``join``."""
        current = Generators()
        self._shared = self._shared or current
        self._left = current.digest()
        seed_rank(mix_seed(self._left, self._number, *self._place), self._device)

    def join(self, stages: int) -> None:
        """Draw the same numbers as the other stages again; ``stages``: their number."""
        seed_rank(mix_seed(self._left, self._number, self._place[0], stages), self._device)


def share_generators(world: World) -> None:
    """Let ranks that compute the same draw the random numbers of the first of them. Collective.

    For a loop of the user's own, which need not seed its ranks.
    """
    states = world.all_gather_object((world.identical_group, capture()))
    restore(next(state for group, state in states if group == world.identical_group))
