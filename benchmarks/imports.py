"""What importing costs over ``import torch``, in fresh interpreters taken in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys

from .table import show

STATEMENTS = {
    "torch": "import torch",
    "torch, phalanx": "import torch, phalanx",
    "torch, phalanx: Trainer, TrainModule, Fabric": "import torch, phalanx; "
    "phalanx.Trainer, phalanx.TrainModule, phalanx.Fabric",
    "torch, lightning": "import torch, lightning.pytorch",
    "torch, accelerate": "import torch; from accelerate import Accelerator",
}


def imports(rounds: int, quick: bool) -> None:
    """Print medians of CPU and wall milliseconds."""
    found: dict[str, list[tuple[float, float]]] = {label: [] for label in STATEMENTS}
    for number in range(1 + (3 if quick else max(rounds, 5))):
        for label, statement in STATEMENTS.items():
            cost = _cost(statement)
            if number:  # the first of each fills the page cache
                found[label].append(cost)
    medians = {label: [statistics.median(kind) for kind in zip(*costs, strict=True)] for label, costs in found.items()}
    base = medians["torch"]
    rows = [[label, cpu, cpu - base[0], wall, wall - base[1]] for label, (cpu, wall) in medians.items()]
    show("Import, ms, medians", ["", "cpu", "over torch", "wall", "over torch"], rows)


def _cost(statement: str) -> tuple[float, float]:
    script = (
        f"import time; w, c = time.perf_counter(), time.process_time(); {statement}; "
        "print((time.process_time() - c) * 1e3, (time.perf_counter() - w) * 1e3)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    cpu, wall = done.stdout.split()[-2:]
    return float(cpu), float(wall)
