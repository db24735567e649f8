"""Communication of a step under each strategy, and its time compared with the same library driven by hand."""

from __future__ import annotations

import statistics
from typing import Any

from .collectives import cells, each, minus
from .processes import results
from .table import show

STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero3-nvme")
BY_HAND = ("fsdp", "zero2")


def strategies(rounds: int, quick: bool) -> None:
    """Count the collectives of a step, as the slope between two fits. A GPT of 0.9 M parameters on 2 ranks."""
    names = STRATEGIES[:3] if quick else STRATEGIES
    rows: list[list[object]] = []
    for name, (short, long, short_4, long_4) in _run("count", 1, 1, names).items():
        for window, found in ((1, minus(long, short)), (4, minus(long_4, short_4))):
            rows.append([name, window, *cells(each(found, 4))])
    head = ["", "accumulation", "collectives", "bytes", "of which"]
    show("Communication for each optimizer step, a GPT of 0.9 M parameters on 2 ranks", head, rows)


def by_hand(rounds: int, quick: bool) -> None:
    """Time steps, alternating with the library driven by hand, in the same processes."""
    rows: list[list[object]] = []
    for name, pairs in _run("time", rounds, 8 if quick else 40, BY_HAND).items():
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        theirs, ours = (statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
        rows.append([name, theirs, ours, f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}"])
    head = ["", "by hand, ms", "phalanx, ms", "median ratio", "of the rounds"]
    show("A step compared with the same library driven by hand, a GPT of 0.9 M parameters on 2 ranks", head, rows)


def _run(what: str, rounds: int, steps: int, names: tuple[str, ...]) -> dict[str, Any]:
    found = results("benchmarks.sharded_rank", what, str(rounds), str(steps), *names, ranks=2, seconds=1200)
    return dict(found[0]) if found else {}
