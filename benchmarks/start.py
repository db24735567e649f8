"""Start-up: the import over ``import torch``, and a process that trains one step over the raw loop."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping

from .sides import SIDES, missing
from .tables import ROOT, Table

IMPORTS = {
    "torch": "pass",
    "phalanx": "import phalanx",
    "phalanx: Trainer, TrainModule": "from phalanx import Trainer, TrainModule",
    "phalanx: Fabric": "from phalanx import Fabric",
    "accelerate": "from accelerate import Accelerator",
    "lightning.fabric": "import lightning.fabric",
    "lightning.pytorch": "import lightning.pytorch",
    "ignite": "import ignite.engine, ignite.handlers",
}


def start(rounds: int, quick: bool) -> Iterator[Table]:
    """The import, and the time from the start of a process to the end of a fit of one step."""
    yield Table(
        "import", _head("package"), _rows({title: f"import torch; {rest}" for title, rest in IMPORTS.items()}, rounds)
    )
    first_step = "from benchmarks.sides import run; from benchmarks.task import Job; run({!r}, Job(steps=1))"
    sides = {side: first_step.format(side) for side in SIDES if not missing(side)}
    yield Table("start to the end of a fit of one step", _head("program"), _rows(sides, rounds))


def _head(first: str) -> list[str]:
    """Return the head of a table, in which additional time is that over the first row."""
    return [first, "CPU time, ms", "additional CPU time, ms", "wall time, ms", "additional wall time, ms"]


def _rows(statements: Mapping[str, str], rounds: int) -> list[list[object]]:
    found: dict[str, list[tuple[float, float]]] = {title: [] for title in statements}
    for number in range(1 + rounds):
        for title, statement in statements.items():
            cost = _cost(statement)
            if number:  # The first of each compiles the sources and fills the page cache.
                found[title].append(cost)
    rows: list[list[object]] = []
    for title, costs in found.items():
        row: list[object] = [title]
        for own, base in zip(zip(*costs, strict=True), zip(*next(iter(found.values())), strict=True), strict=True):
            more = statistics.median(mine - its for mine, its in zip(own, base, strict=True))
            row += [statistics.median(own), more if rows else ""]
        rows.append(row)
    return rows


def _cost(statement: str) -> tuple[float, float]:
    """Return the CPU and wall milliseconds of a statement in a fresh interpreter."""
    script = (
        f"import time; began = time.perf_counter(); {statement}; "
        "print(time.process_time() * 1e3, (time.perf_counter() - began) * 1e3)"
    )
    # As after an installation by pip, which compiles: every side is read from its byte code.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
        env={**variables, "OMP_NUM_THREADS": "1"},
    )
    cpu, wall = done.stdout.split()[-2:]
    return float(cpu), float(wall)
