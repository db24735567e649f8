"""Bytes that each rank holds for parameters, gradients and optimizer state, beside the formulas, for every strategy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.memory.formulas import LAYOUTS, Footprint, Ranks, footprint
from phalanx.framework.memory.measure import size_of

from .memory_rank import Model
from .table import show

RANKS = 2
SHAPE, SHORT_SHAPE = (512, 9, 2048), (128, 9, 512)
SECONDS = 300
_HEAD = ["MB", "formula", "tensors", "over it, %", "formula with buckets", "resident", "formula on disk", "on disk"]


@dataclass(frozen=True)
class Held:
    """What a rank was seen to hold, in bytes."""

    tensors: int
    resident: int
    on_disk: int


def memory(rounds: int, quick: bool) -> None:
    """Measure each strategy in fresh processes; bytes do not vary, so one round does."""
    shape = SHORT_SHAPE if quick else SHAPE
    size = replace(size_of(Model(*shape)), state_slots=2.0)
    for precision in ("32-true", "bf16-mixed"):
        for window in (1,) if quick else (1, 4):
            rows: list[list[object]] = []
            for name, layout in LAYOUTS.items():
                ranks = Ranks(1 if name == "single" else RANKS)
                held = _measured(name, precision, window, shape, ranks.world_size)
                needs = footprint(layout, size, ranks, resolve_precision(precision), accumulates=window > 1)
                rows.append([name, *_cells(held, needs)])
            held_by = f"Held by each of {RANKS} ranks, {size.elements / 1e6:.1f} M parameters"
            show(f"{held_by}, {precision}, windows of {window}", _HEAD, rows)


def _cells(held: Held | None, needs: Footprint) -> list[object]:
    """Return the cells of a row. Buffers to a disk are there all the time; other buckets come and go, or are small."""
    in_memory = needs.device.held + needs.host.held + needs.host.buckets
    buckets = needs.device.buckets
    if held is None:
        return [in_memory / 1e6, "-", "-", (in_memory + buckets) / 1e6, "-", needs.disk.held / 1e6, "-"]
    return [
        in_memory / 1e6,
        held.tensors / 1e6,
        f"{100 * (held.tensors / in_memory - 1):+.1f}" if in_memory else "-",
        (in_memory + buckets) / 1e6,
        held.resident / 1e6,
        needs.disk.held / 1e6,
        held.on_disk / 1e6,
    ]


def _measured(name: str, precision: str, window: int, shape: tuple[int, int, int], ranks: int) -> Held | None:
    """Run a fit under torchrun; return what the rank that held most told."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # Next to this file, because a temporary directory may lie in memory, to which DeepSpeed does not swap.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".swapped-") as folder:
        done = subprocess.run(
            [*launcher, "-m", "benchmarks.memory_rank", name, precision, str(window), json.dumps(shape)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=Path(__file__).parent.parent,
            env={
                **os.environ,
                # Of a virtual environment that is not activated, DeepSpeed's builds would not find ninja.
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
                "OMP_NUM_THREADS": "1",
                "PHALANX_NVME_PATH": folder,
                # So that what is freed goes back to the system, and resident memory tells what is held.
                "MALLOC_ARENA_MAX": "1",
                "MALLOC_MMAP_THRESHOLD_": "65536",
            },
        )
    told = [json.loads(line.removeprefix("HELD ")) for line in done.stdout.splitlines() if line.startswith("HELD ")]
    if not told:
        print(f"{name} cannot be measured:\n{done.stderr[-3000:]}")
        return None
    return max((Held(**one) for one in told), key=lambda one: one.tensors)
