"""phalanx beside the raw torch loop, Lightning, its Fabric, and Accelerate.

Results of one run compare with each other, not with those of another run or machine.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from importlib.metadata import version

import torch

from .alternating import alternating
from .calls import calls
from .checkpoints import checkpoints
from .collectives import collectives
from .growth import growth
from .imports import imports
from .memory import memory
from .meter import meter
from .nonfinite import nonfinite
from .sharded import by_hand, strategies
from .step import bare_and_everyday, callbacks, logged_values

CONCERNS: dict[str, Callable[[int, bool], None]] = {
    "step": bare_and_everyday,
    "values": logged_values,
    "alternating": alternating,
    "callbacks": callbacks,
    "calls": calls,
    "imports": imports,
    "collectives": collectives,
    "strategies": strategies,
    "by_hand": by_hand,
    "memory": memory,
    "checkpoints": checkpoints,
    "nonfinite": nonfinite,
    "meter": meter,
    "growth": growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=CONCERNS, help="measure only this concern; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="times every side is measured, in turn (default: 7)")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of short fits: whether it runs, not what it costs"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = ("torch", "phalanx", "lightning", "accelerate")
    print(", ".join(f"{name} {version(name)}" for name in names), f"on Python {platform.python_version()}, one thread")
    for name in chosen.only or CONCERNS:
        CONCERNS[name](2 if chosen.quick else chosen.rounds, chosen.quick)


if __name__ == "__main__":
    main()
