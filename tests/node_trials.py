"""Lose a node of a launch at a random instant; a spare takes its place, or fewer ranks go on.

    python tests/node_trials.py --trials 20
    python tests/node_trials.py --trials 5 --kinds spare --strategies fsdp --seed 7

``spare``: the launcher of a node is killed, and the kernel kills its rank with it. The weights at the end must be
those of the undisturbed run, bit for bit. In every second trial the checkpoints are deleted with the node, so that the
run can only continue from memory. ``fewer``: the cable between two hosts is cut, which are network namespaces. The
first host continues alone with the same global batch. Its weights must match those of a run on one rank, up to
rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import host_run
import torch
from launched_nodes import LAUNCH, outcome, several_nodes
from ranks import close_pools, preload, run_on_ranks, wait_until
from two_hosts import ended, reason_against, two_hosts

KINDS = ("spare", "fewer")
STRATEGIES = ("ddp", "fsdp", "zero2")
SCRIPT = Path(host_run.__file__)
STEPS = 40
SECONDS = "0.05"
SAMPLES = 8


def steps_of(folder: Path) -> list[int]:
    """Return the steps that rank 0 has trained, in order."""
    path = folder / "losses_0.jsonl"
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(folder: Path, at: int, nodes: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait until a step has been trained, or the run is over."""
    wait_until(lambda: steps_of(folder)[-1:] >= [at] or any(each.poll() is not None for each in nodes), seconds=90.0)


def weights_of(folder: Path) -> dict[str, Any]:
    """Return the weights at the end of a run."""
    found: dict[str, Any] = torch.load(folder / "weights.pt")
    return found


def undisturbed(folder: Path, strategy: str, ranks: int, samples: int) -> dict[str, Any]:
    """Return the weights of the run that no fault disturbs."""
    folder.mkdir()
    run_on_ranks(ranks, host_run.main, folder, strategy, ranks, 1, STEPS, 0.0, float(samples), timeout=90.0)
    return weights_of(folder)


def arguments(folder: Path, strategy: str, samples: int = 0) -> list[str]:
    """Return the arguments of the script."""
    return [str(folder), strategy, "0", "1", str(STEPS), SECONDS, str(samples)]


def again(folder: Path) -> int:
    """Return how many steps were trained more than once."""
    # With more micro-batches on fewer ranks, a step has several lines.
    steps = [step for step, _ in itertools.groupby(steps_of(folder))]
    return len(steps) - len(set(steps))


def lose_to_a_spare(folder: Path, strategy: str, at: int, deletes: bool) -> None:
    """Kill the launcher of node 1 after a step; raise unless the others end well."""
    given = ["--spares", "1", str(SCRIPT), *arguments(folder, strategy)]
    with several_nodes(3, *given, nodes="2", temporary=folder) as nodes:
        wait_for_step(folder, at, nodes)
        nodes[1].kill()
        if deletes:
            for number, checkpoints in enumerate(folder.glob("phalanx_logs/*/checkpoints")):
                checkpoints.rename(folder / f"deleted_{number}")
        codes, printed = outcome(nodes)
    if codes != [0, -signal.SIGKILL, 0]:
        raise RuntimeError(f"exit codes {codes}: {printed}")


def lose_to_fewer(folder: Path, strategy: str, at: int) -> None:
    """Cut the cable between two hosts after a step; raise unless the first one ends well."""
    launcher = folder / "launch.py"
    launcher.write_text(LAUNCH)
    with two_hosts() as hosts:
        given = arguments(folder, strategy, SAMPLES)
        nodes = hosts.start_launched(launcher, SCRIPT, given, folder, nodes="1:2")
        wait_for_step(folder, at, nodes)
        hosts.cut()
        codes = ended(nodes, 90.0)
    if codes != [0, 1]:
        raise RuntimeError(f"exit codes {codes}")


def difference(found: dict[str, Any], expected: dict[str, Any], is_exact: bool) -> str:
    """Say what differs between weights; empty if nothing does."""
    tolerance = 0.0 if is_exact else None
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> int:
    """Run trials from the command line; return the number of those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    strategies, wrong = given.strategies.split(","), 0
    preload(["deepspeed"] if any(each.startswith("zero") for each in strategies) else [])
    with tempfile.TemporaryDirectory(prefix="nodes-") as directory:
        root = Path(directory)
        for kind in given.kinds.split(","):
            if kind == "fewer" and (reason := reason_against()):
                print(f"fewer: not run, {reason}")
                continue
            is_spare = kind == "spare"
            ranks, samples = (2, 0) if is_spare else (1, SAMPLES)
            expected = {name: undisturbed(root / f"{kind}-{name}", name, ranks, samples) for name in strategies}
            good, repeated, began = 0, list[int](), time.monotonic()
            for number in range(given.trials):
                seed, strategy = given.seed + number, strategies[number % len(strategies)]
                draw = random.Random(seed)
                folder, at = root / f"{kind}-{number}", draw.randrange(STEPS - 2)
                folder.mkdir()
                try:
                    if is_spare:
                        lose_to_a_spare(folder, strategy, at, deletes=number % 2 == 0)
                    else:
                        lose_to_fewer(folder, strategy, at)
                    if problem := difference(weights_of(folder), expected[strategy], is_spare):
                        raise RuntimeError(problem)
                    good += 1
                    repeated.append(again(folder))
                except (RuntimeError, AssertionError, OSError) as error:
                    wrong += 1
                    print(f"{kind}, seed {seed}, {strategy}, lost after step {at}: {error}", flush=True)
                    for path in sorted(folder.glob("host_*.txt")):
                        print(f"--- {path.name}\n{path.read_text()}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
            most = max(repeated, default=0)
            seconds = time.monotonic() - began
            print(f"{kind}: {good} of {given.trials}, {most} steps again at most, {seconds:.0f} s", flush=True)
    close_pools()
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
