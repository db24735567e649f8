"""Compares the bytes that each rank holds under every strategy with the formulas."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.memory.formulas import LAYOUTS, Footprint, footprint
from phalanx.framework.memory.measure import size_of
from phalanx.framework.memory.ranks import Ranks

from .memory_rank import Model
from .processes import results
from .table import show

RANKS = 2
SHAPE, SHORT_SHAPE = (512, 9, 2048), (128, 9, 512)
_HEAD = ["MB", "formula", "tensors", "over it, %", "formula with buckets", "resident", "formula on disk", "on disk"]


@dataclass(frozen=True)
class Held:
    """Measured bytes of one rank."""

    tensors: int
    resident: int
    on_disk: int


def memory(rounds: int, quick: bool) -> None:
    """Measure each strategy in new processes. One round is enough, as bytes do not vary."""
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
            title = f"Held by each of {RANKS} ranks, {size.elements / 1e6:.1f} M parameters"
            show(f"{title}, {precision}, windows of {window}", _HEAD, rows)


def _cells(held: Held | None, needs: Footprint) -> list[object]:
    """Return the cells of a row. Buffers of a disk are permanent and count as held; others are temporary, or small."""
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
    """Run a fit under torchrun; return the bytes of the rank that held most."""
    # Next to this file, because a temporary directory may be in memory, which DeepSpeed cannot swap to.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".swapped-") as folder:
        variables = {
            # DeepSpeed's builds would not find the ninja of a virtual environment that is not activated.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PHALANX_NVME_PATH": folder,
            # Return freed memory to the system, so that resident memory shows what is held.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        arguments = name, precision, str(window), json.dumps(shape)
        found = results("benchmarks.memory_rank", *arguments, ranks=ranks, variables=variables)
    return max((Held(**rank) for rank in found), key=lambda rank: rank.tensors, default=None)
