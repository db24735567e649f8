"""Run short fits with uneven data and signals at random points, and check that no rank waits forever for another.

    python tests/deadlock_trials.py --trials 200
    python tests/deadlock_trials.py --seed 17 --trials 1
    python tests/deadlock_trials.py --strategies fsdp,zero3 --seed 1000

A trial is drawn from its seed: strategy, ranks, batches of each rank, accumulation, saves, validations, limits, and
what ranks do at which points (``deadlock_run.py``). Its ranks must end within ``--seconds``, all in the same way and
after the same number of optimizer steps. The report of a trial that hangs holds its seed and the stacks of its ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from deadlock_run import STRATEGIES, Case, drawn, run_case
from ranks import close_pools, run_on_ranks

SECONDS = 15.0
"""How long a trial may take; it takes less than a second once its ranks are warm."""
FIRST_SECONDS = 40.0
"""How long the first trial of a strategy may take on new ranks, which import it."""


class Trials:
    """Runs trials; ranks stay alive between those that pass."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self._folder = folder
        self._seconds = seconds
        self._warm: set[tuple[int, str]] = set()

    def problem_of(self, case: Case) -> str:
        """Run a trial; return what went wrong, or nothing."""
        root = self._folder / f"{case.seed}-{case.strategy}-{case.ranks}"
        root.mkdir()
        warm = (case.ranks, case.strategy.rstrip("0123456789"))
        seconds = self._seconds if warm in self._warm else max(self._seconds, FIRST_SECONDS)
        try:
            outcomes = run_on_ranks(case.ranks, run_case, case, str(root), seconds, timeout=seconds + 2)
        except AssertionError as error:
            self._warm = {each for each in self._warm if each[0] != case.ranks}
            return f"{case}\n{case!r}\n{error}"
        self._warm.add(warm)
        return "" if len(set(outcomes)) == 1 else f"{case}\n{case!r}\nthe ranks ended differently: {outcomes}"


def run_trials(folder: Path, seeds: Iterable[int], strategies: Sequence[str], seconds: float = SECONDS) -> list[str]:
    """Run the trials of some seeds, print a line for each, and return the problems."""
    trials, problems = Trials(folder, seconds), []
    for seed in seeds:
        case = drawn(seed, strategies[seed % len(strategies)])
        began = time.monotonic()
        problem = trials.problem_of(case)
        print(f"{'FAILED' if problem else 'passed'} in {time.monotonic() - began:4.1f} s  {case}", flush=True)
        if problem:
            print(problem, flush=True)
            problems.append(problem)
    return problems


def main() -> None:
    """Run trials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first trial; the others count from it")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, with commas between")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long a trial may take")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deadlocks-") as folder:
        try:
            seeds = range(options.seed, options.seed + options.trials)
            problems = run_trials(Path(folder), seeds, options.strategies.split(","), options.seconds)
        finally:
            close_pools()
    print(f"{len(problems)} of {options.trials} trials failed")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
