"""Kill ranks of training runs at random instants; the launcher restarts them from snapshots in memory.

    python tests/recovery_trials.py --trials 100
    python tests/recovery_trials.py --trials 20 --strategies "ddp,fsdp tp=2" --ranks 3 --snapshots auto --seed 7

A trial is one SIGKILL to a rank, to two ranks, or to a rank that is being restarted. In half of the runs the folder of
checkpoints is deleted with the first kill. At the end weights, moments, metrics and every row of ``metrics.csv`` must
be those of the run that nobody killed, bit for bit, and nothing may be left in memory. The table has the optimizer
steps that were done again and the seconds from a death to the next step.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_run import RESULT
from kill_trials import numbers_of_ranks, result_of
from launches import Killed, Launch
from recovery_run import STEPS

SCRIPT = Path(__file__).with_name("recovery_run.py")
STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "fsdp tp=2")
LIMIT_SECONDS = 120.0
KILLS = 4
COMPARED = ("weights", "metrics", "steps", "tensors", "figures")


@dataclass
class Tally:
    """Results of the trials of one strategy on one number of ranks."""

    trials: int = 0
    identical: int = 0
    deleted: int = 0
    again: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Training(Launch):
    """A launch of the script, and the steps that its rank 0 has begun."""

    def steps(self) -> list[tuple[int, float]]:
        """Return the optimizer step and the time at which each batch began."""
        path = self.root / STEPS
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(when)) for step, when in (line.split() for line in lines if line.count(" ") == 1)]

    def ended_at_one_step(self) -> bool:
        """Whether two kills at the same step have ended the run; the same command continues from ``rescued.ckpt``."""
        ended = not self.wait(0.5) and self.process.returncode != 0
        return ended and "failed twice in a row" in self.printed()

    def wait_for_step(self, after: float, beyond: int) -> bool:
        """Wait until a batch beyond a step has begun after a time; False if the run ended before."""
        return self.wait_until(LIMIT_SECONDS, lambda: any(w > after and s > beyond for s, w in self.steps()[-1:]))


def undisturbed(root: Path, arguments: list[str]) -> dict[str, Any]:
    """Return the result of a run that nobody kills."""
    launch = Training(root, SCRIPT, arguments)
    _finish(launch)
    return result_of(root)


def disturbed(root: Path, arguments: list[str], kills: int, deletes: bool, choice: random.Random, tally: Tally) -> None:
    """Kill ranks of a run, and add the steps computed again and the seconds until the next step to ``tally``.

    Raises:
        Killed: it does not end well.
    """
    launch, after, beyond, done = Training(root, SCRIPT, arguments), 0.0, 1, 0
    try:
        while done < kills and launch.wait_for_step(after, beyond) and launch.wait(choice.uniform(0.0, 0.3)):
            ranks = launch.ranks()
            victims = choice.sample(ranks, min(len(ranks), choice.choice([1, 1, 2])))
            died = time.monotonic()
            launch.send(signal.SIGKILL, victims)
            done += 1
            if deletes and done == 1:
                for folder in root.rglob("checkpoints"):
                    shutil.rmtree(folder, ignore_errors=True)
            kills_again = done < kills and choice.random() < 1 / 4
            if kills_again and (launch.wait(choice.uniform(0.1, 0.6)) and (fresh := set(launch.ranks()) - set(ranks))):
                died = time.monotonic()
                launch.send(signal.SIGKILL, [choice.choice(sorted(fresh))])
                done += 1
            if not launch.wait_for_step(died, -1):
                break
            known = launch.steps()
            last = max(step for step, when in known if when < died)
            first, when = next((step, when) for step, when in known if when > died)
            tally.again.append(last - first)
            tally.seconds.append(when - died)
            after, beyond = died, last + 1
        if launch.ended_at_one_step():
            launch = Training(root, SCRIPT, arguments)
        _finish(launch)
    finally:
        tally.trials += done
        tally.deleted += deletes and done
        launch.abandon()


def _finish(launch: Training) -> None:
    launch.end(LIMIT_SECONDS)
    if launch.process.returncode != 0 or not (launch.root / RESULT).exists():
        raise Killed(f"exit code {launch.process.returncode}:\n{launch.printed()}")
    if left := [*Path("/dev/shm").glob(f"phalanx-{launch.process.pid}-*")]:
        raise Killed(f"left in memory: {left}")


def run_trials(
    folder: Path, strategy: str, ranks: int, every: str, trials: int, seed: int, kills: int = KILLS
) -> Tally:
    """Run trials of a strategy on a number of ranks."""
    tally, choice = Tally(), random.Random(f"{seed}/{strategy}/{ranks}")
    arguments = [strategy, str(ranks), every]
    expected = undisturbed(folder / "undisturbed", arguments)
    number = 0
    while tally.trials < trials and len(tally.problems) < 3:
        before, root = tally.trials, folder / f"run-{number}"
        try:
            disturbed(root, arguments, min(kills, trials - before), number % 2 == 0, choice, tally)
            result = result_of(root)
            if wrong := [key for key in COMPARED if result[key] != expected[key]]:
                raise Killed(f"different: {wrong}")
            tally.identical += tally.trials - before
        except Killed as error:
            tally.problems.append(f"{strategy} on {ranks}, run {number}: {error}")
        number += 1
    return tally


HEADER = f"{'strategy':12} ranks trials bit-identical folder-deleted steps-again(median,worst) seconds(median,worst)"


def row(strategy: str, ranks: int, tally: Tally) -> str:
    """Return a line of the table."""
    again, seconds = tally.again or [0], tally.seconds or [0.0]
    return (
        f"{strategy:12} {ranks:5} {tally.trials:6} {tally.identical:13} {tally.deleted:14} "
        f"{statistics.median(again):17g}, {max(again):5} {statistics.median(seconds):15.2f}, {max(seconds):.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run trials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20, help="kills for each strategy and number of ranks")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--snapshots", default="1", help="steps between two snapshots, or auto")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(HEADER, flush=True)
    failed = False
    for strategy in given.strategies.split(","):
        for ranks in numbers_of_ranks(strategy, [int(number) for number in given.ranks.split(",")]):
            with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
                tally = run_trials(Path(folder), strategy, ranks, given.snapshots, given.trials, given.seed)
            print("\n".join([row(strategy, ranks, tally), *tally.problems]), flush=True)
            failed = failed or bool(tally.problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
