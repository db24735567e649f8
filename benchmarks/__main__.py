"""phalanx beside plain torch, Lightning, its Fabric, pytorch-ignite and Accelerate.

Results of one run compare with each other, not with those of another run or machine.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from .checkpoints import checkpoints
from .growth import growth
from .memory import memory
from .ranks import ranks, strategies
from .snapshots import snapshots
from .start import start
from .step import bare, everyday, task, values
from .storage import storage
from .tables import ROOT, Table, write

MEASUREMENTS: dict[str, Callable[[int, bool], Iterator[Table]]] = {
    "step": bare,
    "everyday": everyday,
    "values": values,
    "task": task,
    "start": start,
    "ranks": ranks,
    "strategies": strategies,
    "checkpoints": checkpoints,
    "snapshots": snapshots,
    "storage": storage,
    "memory": memory,
    "growth": growth,
}


def main() -> None:
    """Measure; print the tables, and write them into the pages that show them if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="measure only this; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="times every side is measured, in turn (default: 7)")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of short fits: whether it runs, not what it costs"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into the pages that show them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{_versions()}, one thread; {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f}", flush=True)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if chosen.write else []
    for name in chosen.only or MEASUREMENTS:
        for table in MEASUREMENTS[name](2 if chosen.quick else chosen.rounds, chosen.quick):
            print(f"\n### {table.name}\n\n{table}", flush=True)
            for page in write(table, pages):
                print(f"written into {page.relative_to(ROOT)}", flush=True)


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "phalanx", "lightning", "pytorch-ignite", "accelerate"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
