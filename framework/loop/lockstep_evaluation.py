"""Evaluation in lockstep: all ranks run the same number of forward passes, because these contain collectives.

A rank that has run out of batches repeats its last batch; hooks, logs and metrics do not see it. Ranks agree batch by
batch on whether to continue, so loaders may have any length, known or unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..diagnostics.isolated_step import fresh
from ..distributed.world import World

Numbered = tuple[int, Any]


def in_rounds(
    batches: Iterator[Numbered], count: int | None, world: World, fill: Callable[[Any], None]
) -> Iterator[Numbered]:
    """Yield a rank's batches, then call ``fill`` with a batch as often as others have more. Collective.

    ``count`` is the number of batches of this rank, if it is certain. A rank without any batch receives one from the
    lowest rank that has one.
    """
    upcoming = next(batches, None)
    answers = world.all_gather_object((upcoming is not None, count))
    holders = [rank for rank, (holds, _) in enumerate(answers) if holds]
    if not holders:
        return
    last = upcoming[1] if upcoming is not None else None
    if len(holders) < world.size:
        shared = world.broadcast_object(last, holders[0])
        last = shared if upcoming is None else last
    counts = [count for _, count in answers if count is not None]
    rounds = max(counts) if len(counts) == world.size else None
    done = 0
    while True:
        item = upcoming
        if item is not None:
            # Before the step, which may modify the batch's containers.
            upcoming, last = next(batches, None), fresh(item[1])
        # The reduction overlaps with the model's forward pass.
        more = torch.tensor([float(upcoming is not None)], dtype=torch.float64)
        pending = world.control_reduce(more) if rounds is None else None
        if item is not None:
            yield item
        else:
            fill(last)
        done += 1
        if pending is not None:
            pending.wait()
        if (done == rounds) if pending is None else not more.item():
            return
