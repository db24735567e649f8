"""Flip single bits in running fits with ``verify_every=1``: each is found, named and undone, and none is saved.

    python tests/flip_trials.py --trials 100
    python tests/flip_trials.py --trials 20 --strategies ddp,fsdp --places weights --seed 7

A trial flips one bit, of a random element, at a random step on a random rank:

    weights     of a weight of this rank, while the passes of a step run
    replica     of a weight of this rank, between two steps; where several ranks hold it
    gradients   of a gradient in the backward pass, on this rank
    messages    of the result of a reduction of gradients, on this rank
    update      of a weight, after the optimizer has computed it

After a flip of a gradient, a message or an update, the fit must end with the weights of one without a flip, bit for
bit, and name the rank. A flip that is rounded away, or in a part of a result that its rank does not use, has no effect:
it need not be named. After a flip of a weight the fit must end with ``CorruptionError``, which names the rank (both of
two that differ). In all cases every checkpoint that it has saved must be that of the fit without a flip.

    python tests/flip_trials.py --quiet-steps 100000

runs as many steps without a flip: none may be reported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from flipped_fits import RANKS, STEPS, trial
from ranks import close_pools, run_on_ranks
from torch import Tensor

from phalanx import checkpoint
from phalanx.framework.report.run_files import RunFiles

STRATEGIES = ("ddp", "fsdp", "zero2")
PLACES = ("weights", "replica", "gradients", "messages", "update")
# An engine's update is computed once, and its reductions write into memory of the engine's own.
NOT_FOR = {("zero2", "update"), ("fsdp", "replica")}


def tensors_by_step(run: str) -> dict[int, dict[str, Tensor]]:
    """Return the weights and moments of the checkpoints of a run."""
    found: dict[int, dict[str, Tensor]] = {}
    for listed in checkpoint.checkpoints(Path(run) / "checkpoints"):
        opened = checkpoint.open_checkpoint(listed.path)
        assert listed.step is not None
        found[listed.step] = {
            f"{section}/{name}": tensor
            for section in ("model", "optimizer")
            for name, tensor in opened.read_section(section).items()
        }
    return found


@cache
def clean_run(strategy: str) -> dict[int, dict[str, Tensor]]:
    """Return the weights and moments of a run without a flip."""
    with tempfile.TemporaryDirectory() as root:
        return tensors_by_step(run_on_ranks(RANKS, trial, root, strategy, "none", 0)[0]["run"])


def verdict(strategy: str, place: str, seed: int, clean: dict[int, dict[str, Tensor]]) -> str:
    """Run a trial; return ``found``, ``no effect``, ``no flip`` or what is wrong."""
    with tempfile.TemporaryDirectory() as root:
        outcomes = run_on_ranks(RANKS, trial, root, strategy, place, seed)
        first = outcomes[0]
        rank, run = first["rank"], first["run"]
        if not outcomes[rank]["flipped"]:
            return "no flip"
        saved = tensors_by_step(run)
        for step, tensors in saved.items():
            if any(not torch.equal(tensor, clean[step][name]) for name, tensor in tensors.items()):
                return f"WRONG: a checkpoint after step {step} holds other numbers"
        notes = " ".join(RunFiles(Path(run)).events.notes)
        ends = place in ("weights", "replica")
        said = first["error"] if ends else notes
        if ends != bool(first["error"]):
            return f"WRONG: ended with {first['error']!r}"
        if ends and max(saved, default=0) > first["at"]:
            return "WRONG: saved after the flip"
        if not ends and max(saved) != STEPS:
            return "WRONG: did not get to its end"
        if "was computed wrongly" not in said and not ends:
            # Every checkpoint is right.
            return "no effect" if place in ("gradients", "messages") else "WRONG: not found"
        return "found" if f"rank {rank} (" in said else f"WRONG: not named: {said}"


def main() -> int:
    """Run the trials, print the table, and return the number of trials that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=100, help="for each strategy, over its places")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, with commas between")
    parser.add_argument("--places", default=",".join(PLACES), help="names, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet-steps", type=int, default=0, metavar="N", help="instead: N verified steps, no flip")
    given = parser.parse_args()
    wrong = 0
    try:
        for strategy in given.strategies.split(","):
            if given.quiet_steps:
                with tempfile.TemporaryDirectory() as root:
                    trial_of = (trial, root, strategy, "none", 0, given.quiet_steps)
                    outcomes = run_on_ranks(RANKS, *trial_of, timeout=given.quiet_steps)
                alarms = sum(bool(each["error"]) for each in outcomes)
                print(
                    f"{strategy}: {given.quiet_steps} verified steps without a flip, {alarms} false alarms", flush=True
                )
                wrong += alarms
                continue
            places = [each for each in given.places.split(",") if (strategy, each) not in NOT_FOR]
            clean = clean_run(strategy)
            tallies: dict[str, Counter[str]] = {place: Counter() for place in places}
            for number in range(given.trials):
                place = places[number % len(places)]
                found = verdict(strategy, place, given.seed + number, clean)
                tallies[place][found] += 1
                if found.startswith("WRONG"):
                    wrong += 1
                    print(f"{strategy} {place} seed {given.seed + number}: {found}", flush=True)
            for place, tally in tallies.items():
                print(f"{strategy:6} {place:10} " + ", ".join(f"{n} {what}" for what, n in tally.items()), flush=True)
    finally:
        close_pools()
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
