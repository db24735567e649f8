"""Run out of memory on one rank at random points of random fits: they must continue with the same losses.

    python tests/memory_trials.py --trials 100 --strategies ddp,zero2
    make memory TRIALS=100

Each strategy has that many trials. A trial draws, from its seed, a number of ranks, a place (forward pass, backward
pass, update), the rank, the step and the largest micro-batch that fits. Its fit must end with the losses and weights of
a fit that was given small micro-batches from the start, within a relative error of 1e-6 for the losses, and no rank may
hang.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
from memory_run import Trial, drawn, fitted
from ranks import close_pools, run_on_ranks, run_script

SECONDS = 60.0
SCRIPT = Path(__file__).with_name("memory_run.py")
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
RESTARTED = ("zero3",)
"""Strategies whose ranks are started again with smaller micro-batches."""


def problem_of(trial: Trial) -> tuple[str, int]:
    """Run a trial; return what went wrong, or nothing, and how often memory was short."""
    run = _scripted if trial.strategy in RESTARTED else _on_ranks
    try:
        found, expected = run(trial, "auto"), run(trial, trial.largest)
    except AssertionError as error:
        return f"{trial!r}\n{error}", 0
    raised = sum(each[3] for each in found)
    for (losses, weights, steps, _), (by_hand, their_weights, their_steps, _) in zip(found, expected, strict=True):
        apart = max(abs(one - other) / abs(other) for one, other in zip(losses, by_hand, strict=True))
        if apart > 1e-6:
            return f"{trial!r}\nthe losses differ by {apart:.2g}: {losses} and {by_hand}", raised
        if steps != their_steps or not torch.allclose(weights, their_weights, rtol=1e-4, atol=1e-6):
            return f"{trial!r}\nthe weights differ, or the steps: {steps} and {their_steps}", raised
    return "", raised


def _on_ranks(trial: Trial, micro: int | str) -> list[Any]:
    return run_on_ranks(trial.ranks, fitted, trial, micro, timeout=SECONDS)


def _scripted(trial: Trial, micro: int | str) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        done = run_script(SCRIPT, folder, str(trial.seed), trial.strategy, str(micro), timeout=SECONDS)
        assert done.returncode == 0, done.stdout[-3000:]
        losses, weights, steps = json.loads((Path(folder) / "result.json").read_text())
    return [(losses, torch.tensor(weights), steps, done.stdout.count("a rank ran out of memory"))]


def main() -> None:
    """Run trials from the command line, and print a table of places and strategies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=30, help="for each strategy")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first trial; the others count from it")
    options = parser.parse_args()
    passed, run, short = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    try:
        seeds = range(options.seed, options.seed + options.trials)
        for strategy, seed in product(options.strategies.split(","), seeds):
            trial = drawn(seed, strategy)
            began, key = time.monotonic(), (trial.strategy, trial.place)
            problem, raised = problem_of(trial)
            run[key] += 1
            passed[key] += not problem
            short[key] += raised > 0
            print(f"{'FAILED' if problem else 'passed'} in {time.monotonic() - began:4.1f} s  {trial}", flush=True)
            if problem:
                print(problem, flush=True)
    finally:
        close_pools()
    print(f"\n{'strategy':10}{'place':10}{'trials':>8}{'short':>8}{'passed':>8}")
    for (strategy, place), count in sorted(run.items()):
        key = strategy, place
        print(f"{strategy:10}{place:10}{count:8}{short[key]:8}{passed[key]:8}")
    raise SystemExit(sum(run.values()) != sum(passed.values()))


if __name__ == "__main__":
    main()
