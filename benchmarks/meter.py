"""The cost per step of the meter, which counts units, seconds and shares in every fit.

The work that the meter adds to a step is repeated by itself, and the loop without it is subtracted: in full steps it
would disappear among differences many times its size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from phalanx.framework.distributed.control_vector import NUMBERS
from phalanx.framework.distributed.world import World
from phalanx.framework.profiling.meter import Meter
from phalanx.framework.profiling.sample_count import SampleCount

from .table import show

_BATCH = (torch.ones(4, 8), torch.ones(4))
_DICT = {"input_ids": torch.ones(4, 8), "labels": torch.ones(4)}


def meter(rounds: int, quick: bool) -> None:
    """The microseconds of a step with one micro-batch."""
    steps = 2_000 if quick else 50_000
    cases: dict[str, Callable[[int], float]] = {
        "one rank, samples of a tuple": lambda steps: _counting(steps, 1, _BATCH),
        "one rank, samples of a dict": lambda steps: _counting(steps, 1, _DICT),
        "one rank, tokens": lambda steps: _counting(steps, 1, None),
        "several ranks, samples of a tuple": lambda steps: _counting(steps, 2, _BATCH),
    }
    rows: list[list[object]] = []
    for label, run in cases.items():
        run(steps // 10)
        found = [(run(steps) - _empty(steps)) / steps * 1e6 for _ in range(rounds)]
        rows.append([label, statistics.median(found), min(found)])
    show(f"The meter, µs a step, {rounds} rounds", ["", "median", "least"], rows)


def _empty(steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        pass
    return time.perf_counter() - began


def _counting(steps: int, ranks: int, batch: Any) -> float:
    """Return the seconds of the meter's work in a number of steps; without a batch, it counts weights."""
    world = cast(World, SimpleNamespace(size=ranks, identical=1, device=torch.device("cpu")))
    counter = Meter(world)
    clock, samples = time.perf_counter, SampleCount()
    weigh = counter.adding(lambda batch: 1.0)
    start = clock()
    for _ in range(steps):
        began = clock()
        fetched = clock()
        if batch is None:
            weigh(batch)
        else:
            counter.open_units += samples(batch)
        if ranks > 1:
            _share(counter, clock)
        counter.end_step(began, fetched)
    seconds = clock() - start
    # The vector of the control reduction exists without the meter, too.
    return seconds - _vectors(steps) if ranks > 1 else seconds


def _share(counter: Meter, clock: Callable[[], float]) -> None:
    vector = torch.tensor((*_NOTHING, *counter.unsent()), dtype=torch.float64)
    began = clock()
    counter.waited(clock() - began)
    counter.receive(vector.tolist()[NUMBERS:])


_NOTHING = (0.0,) * NUMBERS


def _vectors(steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        torch.tensor(_NOTHING, dtype=torch.float64).tolist()
    return time.perf_counter() - began
