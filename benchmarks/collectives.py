"""Communication of two ranks under ddp, per optimizer step and at the end of an epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .sides import NAMES
from .table import show
from .task import Job

Counts = dict[str, list[float]]
RANKS = 2
VALUES = (0, 1, 10, 100)


def collectives(rounds: int, quick: bool) -> None:
    """Count, as the slope between two fits; counts do not vary, so one round is enough."""
    steps: list[list[object]] = []
    epochs: list[list[object]] = []
    for name in NAMES:
        lengths = [Job(count * window, accumulate=window, ranks=RANKS) for window in (1, 4) for count in (5, 25)]
        ends = [Job(8, epochs=count, epoch_values=values, ranks=RANKS) for values in VALUES for count in (2, 6)]
        counts = _count(name, [*lengths, *ends])
        if counts is None:
            continue
        for window, (short, long) in zip((1, 4), _pairs(counts[:4]), strict=True):
            found = minus(long, short)
            steps.append([name, window, *cells(each(found, found["steps"][0]))])
        per_step = minus(counts[1], counts[0])
        for values, (short, long) in zip(VALUES, _pairs(counts[4:]), strict=True):
            found = minus(long, short)
            share = found["steps"][0] / per_step["steps"][0]
            in_steps = {kind: [value * share for value in both] for kind, both in per_step.items()}
            epochs.append([name, values, *cells(each(minus(found, in_steps), 4))])
    head = ["", "collectives", "bytes", "of which"]
    show("Communication for each optimizer step, ddp on 2 ranks", ["", "accumulation", *head[1:]], steps)
    show("Communication at an epoch's end, ddp on 2 ranks", ["", "metrics", *head[1:]], epochs)


def _count(name: str, jobs: list[Job]) -> list[Counts] | None:
    request = json.dumps([{**asdict(job), "directory": "."} for job in jobs])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.ranks", name, request],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("COUNTED "):
            found: list[Counts] = json.loads(line.removeprefix("COUNTED "))
            return found
    print(f"{name} cannot be counted:\n{done.stderr[-3000:]}")
    return None


def _pairs(counts: list[Counts]) -> list[tuple[Counts, Counts]]:
    return list(zip(counts[::2], counts[1::2], strict=True))


def each(found: Counts, length: float) -> Counts:
    return {name: [value / length for value in both] for name, both in found.items() if name != "steps"}


def minus(long: Counts, short: Counts) -> Counts:
    return {
        name: [long.get(name, [0, 0])[at] - short.get(name, [0, 0])[at] for at in (0, 1)] for name in {*long, *short}
    }


def cells(found: Counts) -> list[Any]:
    number, size = (sum(both[at] for both in found.values()) for at in (0, 1))
    kinds = ", ".join(f"{both[0]:g} {name}" for name, both in sorted(found.items()) if both[0])
    return [f"{number:g}", f"{size:g}", kinds or "-"]
