"""Start-up: CPU time of the import over ``import torch``, and of a process that trains one step over the raw loop."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from .sides import NAMES
from .table import show

IMPORTS = {
    "torch": "import torch",
    "torch, phalanx": "import torch, phalanx",
    "torch, phalanx: Trainer, TrainModule": "import torch; from phalanx import Trainer, TrainModule",
    "torch, phalanx: Fabric": "import torch; from phalanx import Fabric",
    "torch, lightning": "import torch, lightning.pytorch",
    "torch, accelerate": "import torch; from accelerate import Accelerator",
}
FIRST_STEP = {
    name: "import os, sys; shown, sys.stdout, sys.stderr = sys.stdout, open(os.devnull, 'w'), open(os.devnull, 'w'); "
    f"from benchmarks.side_{name} import fit; from benchmarks.task import Job; fit(Job(steps=1)); sys.stdout = shown"
    for name in NAMES
}


def imports(rounds: int, quick: bool) -> None:
    """Print medians of CPU and wall milliseconds, from the start of a fresh interpreter."""
    rounds = 3 if quick else max(rounds, 5)
    head = ["", "cpu", "over the first", "wall", "over the first"]
    show("Import, ms, medians", head, _rows(IMPORTS, rounds))
    show("Process start to the end of a fit of one step, ms, medians", head, _rows(FIRST_STEP, rounds))


def _rows(statements: dict[str, str], rounds: int) -> list[list[object]]:
    found: dict[str, list[tuple[float, float]]] = {label: [] for label in statements}
    for number in range(1 + rounds):
        for label, statement in statements.items():
            cost = _cost(statement)
            if number:  # The first of each compiles the sources and fills the page cache.
                found[label].append(cost)
    medians = {label: [statistics.median(kind) for kind in zip(*costs, strict=True)] for label, costs in found.items()}
    base = next(iter(medians.values()))
    return [[label, cpu, cpu - base[0], wall, wall - base[1]] for label, (cpu, wall) in medians.items()]


def _cost(statement: str) -> tuple[float, float]:
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
        cwd=Path(__file__).parent.parent,
        env={**variables, "OMP_NUM_THREADS": "1"},
    )
    cpu, wall = done.stdout.split()[-2:]
    return float(cpu), float(wall)
