"""The sides of every comparison, each imported at its first run, and the measurement of a cost as a slope."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from .task import Job, unseen

NAMES = ("raw", "phalanx", "fabric", "accelerate", "lightning")


def load(name: str) -> Callable[[Job], nn.Module]:
    """Return the ``fit`` of a side."""
    fit: Callable[[Job], nn.Module] = import_module(f"{__package__}.side_{name}").fit
    return fit


def run(name: str, job: Job) -> nn.Module:
    """Fit a job in a new directory, without output; return the trained net."""
    fit = load(name)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, unseen():
        return fit(replace(job, directory=Path(directory)))


@dataclass
class Price:
    """The cost of one step in microseconds, one value per round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu)

    @property
    def median_wall(self) -> float:
        return statistics.median(self.wall)


def timed(name: str, job: Job) -> tuple[float, float]:
    """Return the CPU seconds of this process and the wall seconds that a fit takes."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run(name, job)
    return time.process_time() - cpu, time.perf_counter() - wall


def slope(name: str, short: Job, long: Job) -> tuple[float, float]:
    """Return the microseconds, CPU and wall, of one step: start-up and end cancel out."""
    (short_cpu, short_wall), (long_cpu, long_wall) = timed(name, short), timed(name, long)
    steps = (long.steps - short.steps) * long.epochs
    return (long_cpu - short_cpu) / steps * 1e6, (long_wall - short_wall) / steps * 1e6


def prices(cells: dict[str, tuple[str, Job]], rounds: int) -> dict[str, Price]:
    """Measure cells (a side and its job) in turn, A B C D A B C D, so that a busy machine is busy for all of them.

    A job's ``steps`` are the long fit's; the short one has a fifth of them. A cell that fails is reported and left out.
    """
    cells = {label: cell for label, cell in cells.items() if able(label, *cell)}
    found = {label: Price() for label in cells}
    for side, job in cells.values():
        run(side, replace(job, steps=job.steps // 5))  # warm up
    for _ in range(rounds):
        for label, (side, job) in cells.items():
            cpu, wall = slope(side, replace(job, steps=job.steps // 5), job)
            found[label].cpu.append(cpu)
            found[label].wall.append(wall)
    return found


def able(label: str, side: str, job: Job) -> bool:
    """Whether a side can run the job, and ends with the weights of the raw loop; prints the reason if not."""
    job = replace(job, steps=24)
    try:
        found = run(side, job).state_dict()
    except Exception:
        print(f"{label} cannot be measured:\n{traceback.format_exc(limit=-3)}")
        return False
    expected = run("raw", Job(job.steps, epochs=job.epochs, accumulate=job.accumulate)).state_dict()
    same = all(torch.allclose(found[name], weight, atol=1e-6) for name, weight in expected.items())
    if not same:
        print(f"{label} is not measured: it ends with other weights than the raw loop.")
    return same
