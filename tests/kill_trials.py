"""Kill training runs at random instants, start them again with the same command, compare with the run nobody killed.

    python tests/kill_trials.py --trials 100
    python tests/kill_trials.py --trials 10 --strategies ddp,zero3 --ranks 3 --saving asynchronous --seed 7
    python tests/kill_trials.py --trials 10 --strategies "fsdp tp=2"

A trial is one SIGKILL: to one rank, to all of them with their launcher, or to the launcher alone, at a random instant
of the start-up (one in six) or of the training. After it no process may be left, every directory with a checkpoint's
name must verify, and none may stand further back than before. The same command is then started again, and killed again,
until the run gets to its end: its weights, its optimizer's moments, its metrics and every row of ``metrics.csv`` must
be those of the run that nobody killed, bit for bit, and nothing hidden may be left in its directories.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from kill_run import OVER, RESULT, STARTED
from launches import Killed, Launch

from phalanx.framework.checkpoint.manifest import read_manifest
from phalanx.framework.checkpoint.verify import verify

SCRIPT = Path(__file__).with_name("kill_run.py")
STRATEGIES = ("single", "ddp", "fsdp", "pipeline", "zero2", "zero3", "fsdp tp=2", "pipeline pp=2 dp_shard=2")
RANKS = (2, 3)
MESH_RANKS = 4
"""The number of ranks of a strategy with degrees."""
SAVING = ("synchronous", "asynchronous", "both")
LIMIT_SECONDS = 180.0
TRAINING_SECONDS = 1.0
"""How long after its start a training is killed at the latest."""


@dataclass(frozen=True)
class Setting:
    """Arguments of a run, whose result depends on the strategy and the number of ranks alone."""

    strategy: str
    ranks: int = 2
    asynchronous: bool = False
    workers: int = 0

    @property
    def arguments(self) -> list[str]:
        """The script's arguments after the folder."""
        return [self.strategy, str(self.ranks), str(int(self.asynchronous)), str(self.workers)]


@dataclass
class Tally:
    """Results of the trials of one strategy on one number of ranks."""

    trials: int = 0
    victims: Counter[str] = field(default_factory=Counter)
    in_start: int = 0
    in_save: int = 0
    chains: int = 0
    identical: int = 0
    leftovers: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Training(Launch):
    """One start of the command."""

    def __init__(self, root: Path, setting: Setting) -> None:
        for mark in (STARTED, OVER):
            (root / mark).unlink(missing_ok=True)
        super().__init__(root, SCRIPT, setting.arguments)

    def wait_until_training(self) -> bool:
        """Wait until training begins; False where the run ended before."""
        return self.wait_until(LIMIT_SECONDS, (self.root / STARTED).exists)

    def kill(self, victim: str, choice: random.Random) -> str:
        """Send SIGKILL, and see that all is gone soon after; return who it was sent to."""
        launcher, ranks = self.process.pid, self.ranks()
        if victim == "rank" and not ranks:
            # It has started none by now.
            victim = "launcher"
        chosen = {"launcher": [launcher], "all": [*ranks, launcher], "rank": ranks and [choice.choice(ranks)]}[victim]
        self.send(signal.SIGKILL, chosen)
        self.end(30.0)
        return victim


def checkpoints(root: Path) -> list[Path]:
    """Return every directory with a checkpoint's name."""
    return sorted(path for path in root.rglob("*.ckpt") if not path.name.startswith("."))


def hidden(root: Path) -> set[Path]:
    """Return what unfinished writes, deletions and launches have left."""
    leftovers = {path for path in root.rglob(".*") if path.name != ".lock"}
    # torch's compiler makes a folder of its own there.
    return leftovers | {*root.rglob("*.new"), *(root / "tmp").glob("phalanx-*")}


def newest_step(root: Path) -> int:
    """Return the optimizer step of the furthest checkpoint; all must be good.

    Raises:
        Killed: one is not.
    """
    steps = [0]
    for path in checkpoints(root):
        if problems := verify(path):
            raise Killed(f"{path.name} does not verify: {problems[0]}")
        steps.append(read_manifest(path).document["progress"]["global_step"])
    return max(steps)


def result_of(root: Path) -> dict[str, Any]:
    """Return all that a finished run came to."""
    result: dict[str, Any] = json.loads((root / RESULT).read_text())
    # A run that is killed before its first checkpoint begins anew, in a new directory.
    last = max(root.rglob("last.ckpt"))
    figures = last.parents[1] / "metrics.csv"
    result["tensors"] = {name: record.xxh3_64 for name, record in read_manifest(last).files.items()}
    result["figures"] = figures.read_text()
    result["checkpoints"] = [path.name for path in checkpoints(last.parent)]
    return result


def differences(result: dict[str, Any], expected: dict[str, Any]) -> str:
    """Say in what a result is another one; empty where it is the same."""
    return "; ".join(
        f"{key}: {_shown(result[key], expected[key])}" for key in expected if result.get(key) != expected[key]
    )


def _shown(given: Any, expected: Any) -> str:
    if isinstance(given, str) and "\n" in given:
        lines, wanted = given.splitlines(), expected.splitlines()
        pairs = [(one, other) for one, other in zip(lines, wanted, strict=False) if one != other][:3]
        return f"{len(lines)} lines instead of {len(wanted)}, the first that differ {pairs}"
    return f"{given} instead of {expected}"


def whole_run(root: Path, setting: Setting) -> tuple[dict[str, Any], float]:
    """Run to the end undisturbed; return the result and the seconds until training began."""
    launch = Training(root, setting)
    launch.wait_until_training()
    start_seconds = time.monotonic() - launch.began
    finish(launch)
    return result_of(root), start_seconds


def finish(launch: Launch) -> None:
    """Let a run end by itself.

    Raises:
        Killed: it fails, or leaves something running.
    """
    launch.end(LIMIT_SECONDS)
    if launch.process.returncode != 0:
        raise Killed(f"exit code {launch.process.returncode}:\n{launch.printed()}")


def chain(
    root: Path, setting: Setting, kills: int, start_seconds: float, expected: dict[str, Any], choice: random.Random
) -> Tally:
    """Kill a run up to ``kills`` times, then let it end."""
    tally = Tally(chains=1)
    victims = ["rank", "all", "launcher"] if setting.ranks > 1 else ["all"]
    before, known = 0, set[Path]()
    launch = Training(root, setting)
    try:
        while tally.trials < kills:
            in_start = choice.random() < 1 / 6
            if in_start:
                running = launch.wait(choice.uniform(0.0, start_seconds))
            else:
                running = launch.wait_until_training() and launch.wait(choice.uniform(0.0, TRAINING_SECONDS))
            if not running:
                break
            victim = choice.choice(victims)
            victim = launch.kill(victim, choice)
            tally.trials += 1
            tally.victims[victim] += 1
            tally.in_start += in_start
            now, step = hidden(root), newest_step(root)
            tally.in_save += any(path.parent != root / "tmp" for path in now - known)
            if step < before:
                raise Killed(f"the newest checkpoint is of step {step}, and before the kill it was of {before}")
            before, known = step, now
            launch = Training(root, setting)
        finish(launch)
        newest_step(root)
        left = sorted(str(path.relative_to(root)) for path in hidden(root))
        tally.leftovers = len(left)
        different = differences(result_of(root), expected)
        tally.identical = 0 if different else tally.trials
        if left or different:
            raise Killed(f"left behind: {left}; different: {different or 'nothing'}")
    except Killed as error:
        tally.problems.append(f"{setting}, after {tally.trials} kills: {error}")
    finally:
        launch.abandon()
    return tally


class Trials:
    """The trials of one strategy on one number of ranks, in chains of kills, several of them at a time."""

    def __init__(self, folder: Path, strategy: str, ranks: int, saving: Sequence[bool], seed: int) -> None:
        self.folder = folder
        self.strategy = strategy
        self.ranks = ranks
        self.saving = saving
        self.seed = seed
        self.tally = Tally()
        self._lock = Lock()
        self._left = 0

    def run(self, trials: int, kills: int, at_once: int) -> Tally:
        """Run ``trials`` of them, at most ``kills`` in a chain."""
        began = time.monotonic()
        self._left = trials
        try:
            expected, start_seconds = whole_run(self.folder / "undisturbed", Setting(self.strategy, self.ranks))
        except Killed as error:
            self.tally.problems.append(f"{self.strategy} on {self.ranks}, undisturbed: {error}")
            return self.tally
        with ThreadPoolExecutor(at_once) as pool:
            for each in [
                pool.submit(self._chains, number, kills, start_seconds * at_once, expected) for number in range(at_once)
            ]:
                each.result()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    def _chains(self, worker: int, kills: int, start_seconds: float, expected: dict[str, Any]) -> None:
        choice = random.Random(f"{self.seed}/{self.strategy}/{self.ranks}/{worker}")
        number = 0
        while True:
            with self._lock:
                wanted = min(kills, self._left)
                self._left -= wanted
            if wanted <= 0 or len(self.tally.problems) >= 5:
                return
            saving = self.saving[(number + worker) % len(self.saving)]
            # A worker takes seconds to see that its rank was killed, so few runs have one.
            setting = Setting(self.strategy, self.ranks, saving, workers=int(number % 6 == 5))
            one = chain(self.folder / f"chain-{worker}-{number}", setting, wanted, start_seconds, expected, choice)
            with self._lock:
                add(self.tally, one)
                self._left += wanted - one.trials if one.trials or not one.problems else 0
            number += 1


def add(total: Tally, one: Tally) -> None:
    """Add what came of a chain."""
    for name in ("trials", "in_start", "in_save", "chains", "identical", "leftovers"):
        setattr(total, name, getattr(total, name) + getattr(one, name))
    total.victims += one.victims
    total.problems += one.problems


def numbers_of_ranks(strategy: str, ranks: Sequence[int]) -> Sequence[int]:
    """Return the numbers of ranks to train a strategy on: those that were asked for, unless it fixes them."""
    if strategy == "single":
        return (1,)
    return (MESH_RANKS,) if " " in strategy else ranks


def run_trials(
    folder: Path,
    strategies: Iterable[str] = STRATEGIES,
    trials: int = 20,
    saving: Sequence[bool] = (False,),
    seed: int = 0,
    kills: int = 8,
    at_once: int = 1,
    ranks: Sequence[int] = RANKS,
) -> dict[tuple[str, int], Tally]:
    """Run trials of each strategy on each number of ranks; ``saving``: asynchronously or not, in turn."""
    results = {}
    print(HEADER, flush=True)
    for strategy, number in [(one, number) for one in strategies for number in numbers_of_ranks(one, ranks)]:
        one = Trials(folder / f"{strategy.replace(' ', '-')}-{number}", strategy, number, saving, seed)
        tally = results[strategy, number] = one.run(trials, kills, at_once)
        print(row(strategy, number, tally), flush=True)
        for problem in tally.problems:
            print(problem, flush=True)
    return results


HEADER = (
    f"{'strategy':28}  ranks  trials  rank   all  launcher  in start-up  in a save  runs  bit-identical  left behind  "
    "seconds"
)


def row(strategy: str, ranks: int, tally: Tally) -> str:
    """Return a line of the table."""
    victims, identical = tally.victims, f"{tally.identical} of {tally.trials}"
    return (
        f"{strategy:28}  {ranks:5}  {tally.trials:6}  {victims['rank']:4}  {victims['all']:4}  "
        f"{victims['launcher']:8}  {tally.in_start:11}  {tally.in_save:9}  {tally.chains:4}  {identical:>13}  "
        f"{tally.leftovers:11}  {tally.seconds:7.0f}"
    )


def saves_asynchronously() -> bool:
    """Whether ``ModelCheckpoint`` can."""
    from phalanx.callbacks import ModelCheckpoint
    from phalanx.framework.core.errors import ConfigurationError

    try:
        ModelCheckpoint(asynchronous=True)
    except ConfigurationError:
        return False
    return True


def main() -> None:
    """Run trials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20, help="kills for each strategy and number of ranks")
    parser.add_argument(
        "--strategies",
        default=",".join(STRATEGIES),
        help="names, with commas between; degrees follow as in 'fsdp tp=2'",
    )
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks, with commas between")
    parser.add_argument("--saving", choices=SAVING, default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=8, help="how often one run is killed at most")
    parser.add_argument("--at-once", type=int, default=2, help="how many runs are under way at a time")
    options = parser.parse_args()
    saving = {"synchronous": [False], "asynchronous": [True], "both": [False, True]}[options.saving]
    if any(saving) and not saves_asynchronously():
        saving = [False]
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        names = options.strategies.split(",")
        ranks = [int(number) for number in options.ranks.split(",")]
        results = run_trials(
            Path(folder), names, options.trials, saving, options.seed, options.kills, options.at_once, ranks
        )
    sys.exit(any(tally.problems for tally in results.values()))


if __name__ == "__main__":
    main()
