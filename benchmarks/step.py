"""The cost of a step over the same step in plain torch: time, function calls, logged values.

Every side marks the start of its steps. Between two marks lies a whole step, whatever the loop. Sides take turns in
rounds, and overheads are differences within a round, so that a busy machine is busy for all of them. The tenth
percentile is the more stable number there.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FrameType

from .sides import SIDES, ends_as_raw, missing, run
from .tables import Table
from .task import Job

WARM_UP = 50
RAW, YARDSTICK = "raw", "Fabric"


@dataclass(frozen=True)
class Round:
    """The steps of one fit: microseconds of a step, and of what follows an epoch."""

    least: float
    """The tenth percentile of wall time."""
    wall: float
    cpu: float
    """CPU time of all threads."""
    cpu_mean: float
    """The mean, in which is work that is put off to some steps."""
    epoch_end: float = 0.0
    epoch_end_cpu: float = 0.0


class Marks:
    """The times at which a fit has started its steps."""

    def __init__(self) -> None:
        self._wall: list[int] = []
        self._cpu: list[int] = []

    def __call__(self) -> None:
        self._wall.append(time.perf_counter_ns())
        self._cpu.append(time.process_time_ns())

    def round(self, steps: int) -> Round:
        """Return the numbers of a fit with epochs of some steps; its first steps are left out."""
        wall, cpu = _lengths(self._wall), _lengths(self._cpu)
        measured = range(min(WARM_UP, steps // 5), len(wall))
        within = [index for index in measured if (index + 1) % steps]
        ends = [index for index in measured if not (index + 1) % steps]
        walls = sorted(wall[index] for index in within)
        cpus = [cpu[index] for index in within]
        usual, usual_cpu = statistics.median(walls), statistics.median(cpus)
        return Round(
            walls[len(walls) // 10],
            usual,
            usual_cpu,
            statistics.mean(cpus),
            statistics.median(wall[index] - usual for index in ends) if ends else 0.0,
            statistics.median(cpu[index] - usual_cpu for index in ends) if ends else 0.0,
        )


def _lengths(marks: list[int]) -> list[float]:
    return [(after - before) / 1000 for before, after in pairwise(marks)]


def take_turns(cells: Mapping[str, tuple[str, Job]], rounds: int) -> dict[str, list[Round]]:
    """Measure cells (a side and its job) in turn. Sides are left out whose library is missing."""
    cells = {label: (side, job) for label, (side, job) in cells.items() if not missing(side)}
    for side, job in cells.values():
        ends_as_raw(side, job)
    found: dict[str, list[Round]] = {label: [] for label in cells}
    order = list(cells)
    for _ in range(rounds):
        for label in order:
            side, job = cells[label]
            found[label].append(one_round(side, job))
        order = [*order[1:], order[0]]
    return found


def one_round(side: str, job: Job) -> Round:
    """Fit a job, and return the numbers of its steps."""
    gc.collect()
    marks = Marks()
    run(side, replace(job, mark=marks))
    return marks.round(job.steps)


def over(found: Mapping[str, list[Round]], label: str, base: str, what: Callable[[Round], float]) -> float:
    """Return the median over the rounds of the difference of two cells."""
    return statistics.median(what(own) - what(its) for own, its in zip(found[label], found[base], strict=True))


# What is compared: its title, and where it is in the results of a round.
KINDS: dict[str, Callable[[Round], float]] = {
    "p10 wall": lambda each: each.least,
    "median wall": lambda each: each.wall,
    "median CPU": lambda each: each.cpu,
}


def overheads(name: str, job: Job, rounds: int) -> Iterator[Table]:
    """Yield the table of a step of all sides, and of what follows an epoch."""
    found = take_turns({side: (side, job) for side in SIDES}, rounds)
    rows = []
    for side, measured in found.items():
        row: list[object] = [side]
        for what in KINDS.values():
            row.append(statistics.median(map(what, measured)))
            row += ["", ""] if side == RAW else [over(found, side, RAW, what), _share(found, side, what)]
        row.append("" if side == RAW else over(found, side, RAW, lambda each: each.cpu_mean))
        if job.epochs > 1:
            row += [statistics.median(each.epoch_end / 1000 for each in measured)]
            row += [statistics.median(each.epoch_end_cpu / 1000 for each in measured)]
        rows.append(row)
    ends = ("wall time at end of epoch, ms", "CPU time at end of epoch, ms") if job.epochs > 1 else ()
    columns = ("time, µs", "overhead, µs", "overhead relative to Fabric's")
    yield Table(
        name,
        [
            "program",
            *(f"{kind} {column}" for kind in KINDS for column in columns),
            "mean CPU overhead, µs",
            *ends,
        ],
        rows,
    )


def _share(found: Mapping[str, list[Round]], side: str, what: Callable[[Round], float]) -> str:
    if YARDSTICK not in found:
        return "-"
    return f"{100 * over(found, side, RAW, what) / over(found, YARDSTICK, RAW, what):.0f} %"


def bare(rounds: int, quick: bool) -> Iterator[Table]:
    """The step of a fit without logging, with all guards on, and its function calls."""
    yield from overheads("bare step", Job(steps=300 if quick else 3000), rounds)
    yield calls()


def everyday(rounds: int, quick: bool) -> Iterator[Table]:
    """The step of a fit that logs each step to a CSV file, and validates, saves and may stop after each epoch."""
    job = Job(steps=75, epochs=4, everyday=True) if quick else Job(steps=300, epochs=10, everyday=True)
    yield from overheads("everyday step", job, rounds)


def task(rounds: int, quick: bool) -> Iterator[Table]:
    """The step of a GPT of 0.9 million parameters, beside which the overhead is small."""
    job = Job(steps=10 if quick else 40, model="0.9m")
    found = take_turns({side: (side, job) for side in SIDES}, rounds)
    rows = [
        [
            side,
            statistics.median(each.least for each in measured) / 1000,
            f"{statistics.median(own.least / its.least for own, its in zip(measured, found[RAW], strict=True)):.3f}",
        ]
        for side, measured in found.items()
    ]
    yield Table("step of a GPT", ["program", "p10 wall time per step, ms", "time relative to raw"], rows)


def values(rounds: int, quick: bool) -> Iterator[Table]:
    """The cost of logging 1, 10 and 100 values in every step, over the same fit without logging."""
    sides = (RAW, "phalanx", "Lightning")
    steps = {0: 1000, 1: 1000, 10: 500, 100: 100}
    cells = {
        f"{side} {count}": (side, Job(steps[count] // (2 if quick else 1), values=count))
        for side in sides
        for count in steps
    }
    found = take_turns(cells, rounds)
    present = [side for side in sides if f"{side} 0" in found]
    rows = [
        [str(count), *(over(found, f"{side} {count}", f"{side} 0", lambda each: each.cpu_mean) for side in present)]
        for count in list(steps)[1:]
    ]
    yield Table("logged values", ["values per step", *(f"{side}, CPU µs per step" for side in present)], rows)


# ---- function calls --------------------------------------------------------------------------------------------------


class Calls:
    """Counts the calls of Python functions between two marks."""

    def __init__(self) -> None:
        self.marks = self.all = self.own = 0

    def __call__(self) -> None:
        self.marks += 1
        if self.marks == WARM_UP:
            sys.setprofile(self._see)
        elif self.marks == 2 * WARM_UP:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is not Calls.__call__.__code__:
            self.all += 1
            module = str(frame.f_globals.get("__name__"))
            self.own += module.startswith("phalanx.") and not module.startswith("phalanx.benchmarks.")


def calls(sides: Iterable[str] = SIDES) -> Table:
    """Return the numbers of calls of Python functions in a bare step. They do not vary."""
    rows = []
    for side in sides:
        if not missing(side):
            counter = Calls()
            run(side, Job(3 * WARM_UP, mark=counter))
            rows.append([side, *(f"{count / WARM_UP:.0f}" for count in (counter.all, counter.own))])
    return Table(
        "calls in a bare step",
        ["program", "Python function calls per step", "calls of phalanx functions per step"],
        rows,
    )
