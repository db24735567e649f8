"""What the strategies say to one another in a step, and what a step costs beside the same library driven by hand."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .collectives import cells, each, minus
from .table import show

STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero3-nvme")
BY_HAND = ("fsdp", "zero2")


def strategies(rounds: int, quick: bool) -> None:
    """Count as the slope between two fits: counts do not vary. A small GPT of 0.9 M parameters on 2 ranks."""
    names = STRATEGIES[:3] if quick else STRATEGIES
    rows: list[list[object]] = []
    for name, (short, long, short_4, long_4) in _run("count", 1, 1, names).items():
        for window, found in ((1, minus(long, short)), (4, minus(long_4, short_4))):
            rows.append([name, window, *cells(each(found, 4))])
    head = ["", "accumulation", "collectives", "bytes", "of which"]
    show("Communication for each optimizer step, a GPT of 0.9 M parameters on 2 ranks", head, rows)


def by_hand(rounds: int, quick: bool) -> None:
    """Time a step in turn with the library driven by hand, in one process for each rank."""
    rows: list[list[object]] = []
    for name, pairs in _run("time", rounds, 8 if quick else 40, BY_HAND).items():
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        theirs, ours = (statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
        rows.append([name, theirs, ours, f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}"])
    head = ["", "by hand, ms", "phalanx, ms", "median ratio", "of the rounds"]
    show("A step beside the same library driven by hand, a GPT of 0.9 M parameters on 2 ranks", head, rows)


def _run(what: str, rounds: int, steps: int, names: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.sharded_rank", what, str(rounds), str(steps), *names],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    print(f"{what} failed:\n{done.stderr[-3000:]}")
    return {}
