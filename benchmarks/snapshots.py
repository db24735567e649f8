"""The cost of snapshots in memory: the time of a step with them beside a step without, in one alternating run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .tables import ROOT, Table

SCRIPT = Path(__file__).with_name("snapshot_run.py")
# The width and the number of layers, the steps of a fit, and the settings that are measured beside none.
MODELS = {"1 M": (512, 4, 1500, ("auto", "100")), "100 M": (2048, 24, 40, ("auto", "20"))}
_TIMEOUT_SECONDS = 600


def snapshots(rounds: int, quick: bool) -> Iterator[Table]:
    """The medians over the rounds, and the medians of the ratios within each."""
    rows: list[list[object]] = []
    for name, (width, layers, steps, settings) in MODELS.items():
        if quick:
            width, steps = width // 4, steps // 2
        found: dict[str, list[float]] = {each: [] for each in ("none", *settings)}
        for _ in range(min(rounds, 5)):
            for setting, times in found.items():
                times.append(_milliseconds(width, layers, setting, steps))
        base = found.pop("none")
        rows.append([f"{name}, none", statistics.median(base), ""])
        for setting, times in found.items():
            share = statistics.median(one / other - 1 for one, other in zip(times, base, strict=True))
            title = f"{name}, `{setting!r}`" if setting == "auto" else f"{name}, each {setting} steps"
            rows.append([title, statistics.median(times), f"{share:+.1%}"])
    yield Table("snapshots in memory", ["parameters, snapshots", "ms per step", "share of the step"], rows)


def _milliseconds(width: int, layers: int, setting: str, steps: int) -> float:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(width), str(layers), setting, str(steps)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(next(line for line in done.stdout.splitlines() if line.startswith("ms ")).split()[1])
