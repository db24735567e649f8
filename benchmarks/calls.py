"""Number of function calls per step, and the call depth of ``training_step`` below ``fit``."""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from .sides import NAMES, able, load, run
from .table import show
from .task import Job

SHORT, LONG = 100, 300


def python_calls(name: str, job: Job) -> int:
    """Return the number of calls of Python functions in a fit."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        run(name, job)
    finally:
        sys.setprofile(None)
    return count


def all_calls(name: str, job: Job) -> int:
    """Return the number of function calls in a fit, including functions written in C."""
    profile = cProfile.Profile()
    profile.runcall(run, name, job)
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total


def calls(rounds: int, quick: bool) -> None:
    """Count calls per step, as the slope between two lengths; counts do not vary, so one round is enough."""
    rows: list[list[object]] = []
    for label, name, job in _cells():
        if able(label, name, job(SHORT)):
            run(name, job(SHORT))  # excludes calls that happen once per process
            python = (python_calls(name, job(LONG)) - python_calls(name, job(SHORT))) / (LONG - SHORT)
            both = (all_calls(name, job(LONG)) - all_calls(name, job(SHORT))) / (LONG - SHORT)
            deepest = getattr(getattr(sys.modules[load(name).__module__], "Task", None), "deepest", 0)
            rows.append([label, python, both, deepest or "-"])
    show("Calls in a step", ["", "Python", "with C", "depth of training_step below fit"], rows)


def _cells() -> list[tuple[str, str, Callable[[int], Job]]]:
    bare = [(name, name, Job) for name in NAMES]
    return [*bare, *((f"{name} everyday", name, partial(Job, everyday=True)) for name in NAMES[1:])]
