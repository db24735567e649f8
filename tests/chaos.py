"""Disturb training runs with every kind of fault at random instants, and check that each ends like an undisturbed run.

    python tests/chaos.py
    python tests/chaos.py --trials 20 --strategies ddp,fsdp,zero2 --faults stop,full --seed 7
    python tests/chaos.py --strategies "fsdp tp=2,zero3" --ranks 2,3 --saving both

The training command is ``kill_run.py``: it saves after every optimizer step and logs every loss. A trial is one fault:

    kill-rank, kill-all, kill-launcher   SIGKILL to one rank, to all processes, to the process that was started
    term-rank, term-all, term-launcher   SIGTERM to these: the run saves and ends with 75, and nothing is computed again
    stop                                 SIGSTOP to one rank, and SIGCONT a while later: the run continues
    stop-kill                            SIGSTOP to one rank, and SIGKILL a while later
    full                                 the disk is full until the run has ended
    damage                               SIGKILL to all, and a bit of the newest checkpoint is flipped

After a fault no process may be left, all must be gone within ``--seconds`` of it, every directory with a checkpoint's
name must verify, and the newest may not stand further back than before. The command is started again, and disturbed
again, until it gets to its end: every row of ``metrics.csv``, the metrics, the weights and the moments must
be those of an undisturbed run, bit for bit. Batches that were computed again are counted. A fault that came
when the fit was over, while the script ran on, is no trial.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kill_run import OVER, STEPS
from kill_trials import (
    TRAINING_SECONDS,
    Setting,
    Training,
    checkpoints,
    differences,
    finish,
    hidden,
    newest_step,
    numbers_of_ranks,
    result_of,
    whole_run,
)
from launches import Killed

from phalanx.framework.checkpoint.manifest import read_manifest
from phalanx.framework.checkpoint.verify import verify

STRATEGIES = ("ddp", "fsdp", "zero2")
SAVING = {"synchronous": [False], "asynchronous": [True], "both": [False, True]}
KILLS = ("kill-rank", "kill-all", "kill-launcher")
TERMS = ("term-rank", "term-all", "term-launcher")
FAULTS = (*KILLS, *TERMS, "stop", "stop-kill", "full", "damage")
SEVERAL = frozenset({"kill-rank", "kill-launcher", "term-rank", "term-launcher"})
"""Faults that only mean something where there is more than one process."""
DISK_BYTES = 16 << 20
END_SECONDS = 60.0
# How long a rank is stopped: shorter than any limit on a step that makes no progress.
STOP_SECONDS = 1.5
_KILLED, _PREEMPTED, _STORAGE = 128 + signal.SIGKILL, 75, 74


@dataclass
class Tally:
    """The results of one fault under one strategy."""

    trials: int = 0
    identical: int = 0
    again: int = 0
    """Micro-batches that were computed more than once."""
    orphans: int = 0
    seconds: list[float] = field(default_factory=list)
    """From the fault to the end of the process that was started."""
    codes: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass
class Chaos:
    """One run that is disturbed again and again by one fault."""

    root: Path
    setting: Setting
    fault: str
    choice: random.Random
    seconds: float
    tally: Tally = field(default_factory=Tally)
    damaged: set[int] = field(default_factory=set)
    step: int = 0

    def run(self, times: int, start_seconds: float, expected: dict[str, Any]) -> Tally:
        """Disturb the run up to ``times`` times, then let it end and compare."""
        launch = Training(self.root, self.setting)
        try:
            while self.tally.trials < times and self._come_to_an_instant(launch, start_seconds):
                if self._strike(launch):
                    launch = Training(self.root, self.setting)
            finish(launch)
            self._compare(expected)
        except Killed as error:
            self.tally.problems.append(f"{self.setting.strategy}, {self.fault}, trial {self.tally.trials}: {error}")
            self.tally.orphans += "left the processes" in str(error)
        finally:
            launch.abandon()
        return self.tally

    def _come_to_an_instant(self, launch: Training, start_seconds: float) -> bool:
        if self.fault != "full" and self.choice.random() < 1 / 6:
            # There may be no rank to choose from at that time.
            return launch.wait(self.choice.uniform(0.0, start_seconds)) and self._has_ranks(launch)
        return launch.wait_until_training() and launch.wait(self.choice.uniform(0.0, TRAINING_SECONDS))

    def _has_ranks(self, launch: Training) -> bool:
        if self.setting.ranks == 1:
            return True
        return launch.wait_until(END_SECONDS, lambda: len(launch.ranks()) == self.setting.ranks)

    def _strike(self, launch: Training) -> bool:
        """Disturb the run; return whether it has ended and is to be started again."""
        ranks = launch.ranks() or [launch.process.pid]
        everyone = list(dict.fromkeys([*ranks, launch.process.pid]))
        one = [self.choice.choice(ranks)]
        began = time.monotonic()
        if self.fault.startswith("stop"):
            launch.send(signal.SIGSTOP, one)
            time.sleep(self.choice.uniform(0.1, STOP_SECONDS))
            began = time.monotonic()
            launch.send(signal.SIGCONT if self.fault == "stop" else signal.SIGKILL, one)
            if self.fault == "stop":
                self.tally.trials += 1
                return False
        elif self.fault == "full":
            filler = self.root / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        else:
            kind, _, whom = self.fault.partition("-")
            victims = {"rank": one, "all": everyone, "launcher": [launch.process.pid]}.get(whom, everyone)
            launch.send(signal.SIGTERM if kind == "term" else signal.SIGKILL, victims)
        # Even on a loaded machine the launcher ends well before this.
        with contextlib.suppress(subprocess.TimeoutExpired):
            launch.process.wait(END_SECONDS)
        took = time.monotonic() - began
        launch.end(1.0)
        code = launch.process.returncode
        self._judge(launch, code, took)
        if self.fault == "full":
            (self.root / "filler").unlink(missing_ok=True)
        elif self.fault == "damage":
            self._damage()
        return True

    def _judge(self, launch: Training, code: int, took: float) -> None:
        expected = self._expected()
        if code == 0 or (self.root / OVER).exists():
            # After the fit a signal ends the script as it ends any other.
            # Its ranks may be gone, so that the signal goes to the process that was started.
            expected |= {0} | ({-signal.SIGTERM, 143} if self.fault.startswith("term") else {-signal.SIGKILL})
        else:
            self.tally.trials += 1
            self.tally.seconds.append(took)
            self.tally.codes[code] += 1
        if code not in expected:
            raise Killed(f"exit code {code} instead of {sorted(expected)}; it printed:\n{launch.printed()}")
        if took > self.seconds and self.fault != "full":
            raise Killed(f"took {took:.1f} s to end; it printed:\n{launch.printed()}")
        if self.fault == "damage":
            for path in checkpoints(self.root):
                if path.stat().st_ino not in self.damaged and (problems := verify(path)):
                    raise Killed(f"{path.name} does not verify: {problems[0]}")
            return
        before, self.step = self.step, newest_step(self.root)
        if self.step < before:
            raise Killed(f"the newest checkpoint is of step {self.step}, and before the fault it was of {before}")

    def _expected(self) -> set[int]:
        if self.fault.startswith("term"):
            # A single process has no handlers before its fit begins.
            return {_PREEMPTED} if self.setting.ranks > 1 else {_PREEMPTED, -signal.SIGTERM}
        return {"kill-rank": {_KILLED}, "stop-kill": {_KILLED, -signal.SIGKILL}, "full": {_STORAGE}}.get(
            self.fault, {-signal.SIGKILL}
        )

    def _damage(self) -> None:
        """Flip a bit in the checkpoint that got furthest."""
        good = [path for path in checkpoints(self.root) if path.stat().st_ino not in self.damaged]
        if not good:
            return
        newest = max(good, key=lambda path: int(read_manifest(path).document["progress"]["global_step"]))
        file = self.choice.choice(sorted(newest.glob("*.safetensors")))
        content = bytearray(file.read_bytes())
        place = self.choice.randrange(len(content))
        content[place] ^= 1 << self.choice.randrange(8)
        # In a file of its own: another checkpoint may share it.
        file.unlink()
        file.write_bytes(content)
        self.damaged.add(newest.stat().st_ino)

    def _compare(self, expected: dict[str, Any]) -> None:
        result = result_of(self.root)
        if self.damaged or self.fault.startswith("term"):
            # Other checkpoints than the last one may differ: a damaged one stays, and so does one that a signal saved.
            result["checkpoints"] = expected["checkpoints"]
        steps = (self.root / STEPS).read_text().split()
        self.tally.again += (again := len(steps) - len(set(steps)))
        if again and self.fault.startswith("term"):
            raise Killed(f"{again} batches were computed again")
        if different := differences(result, expected):
            raise Killed(f"different: {different}")
        if self.fault != "damage" and (left := [str(path.relative_to(self.root)) for path in hidden(self.root)]):
            raise Killed(f"left behind: {left}")
        self.tally.identical += self.tally.trials


@contextlib.contextmanager
def disk(place: Path) -> Iterator[Path | None]:
    """Yield the folder of a small disk, or None where mounting is not permitted."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def run_fault(
    folder: Path, setting: Setting, fault: str, trials: int, expected: tuple[dict[str, Any], float], **options: Any
) -> Tally | None:
    """Run the trials of one fault, several in each run; None where this machine does not permit them."""
    total = Tally()
    in_a_row, seed, seconds = options["in_a_row"], options["seed"], options["seconds"]
    saving = options.get("saving", [False])
    number = 0
    while total.trials < trials and len(total.problems) < 3:
        choice = random.Random(f"{seed}/{setting.strategy}/{setting.ranks}/{fault}/{number}")
        # A worker takes seconds to see that its rank was killed, so few runs have one.
        setting = replace(setting, asynchronous=saving[number % len(saving)], workers=int(number % 6 == 5))
        with disk(folder / f"{fault}-{number}") if fault == "full" else contextlib.nullcontext(folder) as place:
            if place is None:
                return None
            root = place / f"{fault}-{number}"
            times = min(in_a_row, trials - total.trials)
            one = Chaos(root, setting, fault, choice, seconds).run(times, expected[1], expected[0])
        for name in ("trials", "identical", "again", "orphans"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.seconds += one.seconds
        total.codes += one.codes
        total.problems += one.problems
        number += 1
        if number > 4 * trials:
            total.problems.append("runs ended before they were disturbed")
    return total


def run_chaos(
    folder: Path, strategies: Iterable[str], faults: Iterable[str], trials: int, **options: Any
) -> dict[tuple[Setting, str], Tally]:
    """Run all trials, printing the table.

    ``options``: ``in_a_row``, ``seed``, ``seconds``; ``ranks``, numbers of them; ``saving``: whether asynchronous ones.
    """
    tallies = {}
    print(HEADER, flush=True)
    ranks = options.pop("ranks", [2])
    for setting in [Setting(one, number) for one in strategies for number in numbers_of_ranks(one, ranks)]:
        place = folder / f"{setting.strategy.replace(' ', '-')}-{setting.ranks}"
        expected = whole_run(place / "undisturbed", setting)
        for fault in faults:
            if setting.ranks == 1 and fault in SEVERAL:
                continue
            tally = run_fault(place, setting, fault, trials, expected, **options)
            if tally is None:
                print(f"{setting.strategy:25}  {fault:13}  skipped: no disk may be mounted here", flush=True)
                continue
            tallies[setting, fault] = tally
            print(row(setting, fault, tally), flush=True)
            for problem in tally.problems:
                print(problem, flush=True)
    return tallies


HEADER = (
    "strategy                   ranks  fault          trials  bit-identical  orphans  "
    "seconds to exit, median and most  batches again  exit codes"
)


def row(setting: Setting, fault: str, tally: Tally) -> str:
    """Return a line of the table."""
    times = sorted(tally.seconds) or [math.nan]
    took = f"{times[len(times) // 2]:.2f}, {times[-1]:.2f}" if tally.seconds else "continues"
    codes = ", ".join(f"{count} x {code}" for code, count in sorted(tally.codes.items()))
    return (
        f"{setting.strategy:25}  {setting.ranks:5}  {fault:13}  {tally.trials:6}  "
        f"{f'{tally.identical} of {tally.trials}':>13}  {tally.orphans:7}  "
        f"{took:>33}  {tally.again:13}  {codes}"
    )


def main() -> None:
    """Run trials from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20, help="for each strategy and fault")
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help="names, with commas between; degrees as in 'fsdp tp=2'"
    )
    parser.add_argument("--ranks", default="2", help="numbers of ranks, with commas between")
    parser.add_argument("--saving", choices=SAVING, default="synchronous")
    parser.add_argument("--faults", default=",".join(FAULTS), help="names, with commas between")
    parser.add_argument("--in-a-row", type=int, default=4, help="how often one run is disturbed at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a killed run may take to be gone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = sorted(set(options.faults.split(",")) - set(FAULTS))
    if wrong:
        parser.error(f"unknown faults {wrong}; known: {', '.join(FAULTS)}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        tallies = run_chaos(
            Path(folder),
            options.strategies.split(","),
            options.faults.split(","),
            options.trials,
            in_a_row=options.in_a_row,
            seed=options.seed,
            seconds=options.seconds,
            ranks=[int(number) for number in options.ranks.split(",")],
            saving=SAVING[options.saving],
        )
    sys.exit(any(tally.problems for tally in tallies.values()))


if __name__ == "__main__":
    main()
