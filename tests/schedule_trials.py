"""Faults on faults: schedules of several faults in one run, by seed. No run may hang, or end with other weights.

    python tests/schedule_trials.py --schedules 200
    python tests/schedule_trials.py --schedules 20 --strategies ddp,fsdp --seed 1000

The run is that of ``recovery_trials``: snapshots in memory after each step, a checkpoint each epoch, restarts without
limit. A schedule is two to four faults. Each comes at one of these moments:

    step        while steps are trained
    recovery    within 0.6 s after the fault before, while ranks are started again
    copy        while a snapshot is written
    save        while a checkpoint is written

and is one of these:

    kill-rank, kill-two, kill-all      SIGKILL to ranks at once
    stop                               SIGSTOP to a rank, SIGCONT half a second later
    damage-one, damage-both            a byte of the newest snapshot, or of both, is changed; SIGKILL to a rank
    delete                             the folder of checkpoints is deleted; SIGKILL to a rank
    kill-launcher, term-launcher       SIGKILL or SIGTERM to the process that was started

A run that ends before its time is started again by the same command. At its end weights, moments, metrics and every row
of ``metrics.csv`` must be those of a run without faults, bit for bit; nothing may be left in memory or running.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kill_run import RESULT
from kill_trials import numbers_of_ranks, result_of
from launches import Killed
from recovery_trials import COMPARED, LIMIT_SECONDS, SCRIPT, Training, undisturbed

from phalanx.framework.checkpoint.manifest import MANIFEST

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3", "fsdp tp=2")
MOMENTS = ("step", "recovery", "copy", "save")
FAULTS = (
    "kill-rank", "kill-two", "kill-all", "stop", "damage-one", "damage-both", "delete", "kill-launcher",
    "term-launcher",
)  # fmt: skip
MOST_STARTS = 12
# The moments of a copy and a save are short: without one within this time, the fault comes anyway.
_MOMENT_SECONDS = 3.0


class Schedule:
    """One run and its faults.

    Args:
        root: the directory of the run.
        arguments: those of the script.
        choice: draws the faults.
    """

    def __init__(self, root: Path, arguments: list[str], choice: random.Random) -> None:
        self._root, self._arguments, self._choice = root, arguments, choice
        self._launch = Training(root, SCRIPT, arguments)
        self._starts = 1
        self.faults = [(choice.choice(MOMENTS), choice.choice(FAULTS)) for _ in range(choice.randint(2, 4))]
        self.done: list[tuple[str, str]] = []
        self._deleted = 0.0

    def run(self) -> None:
        """Run to the end.

        Raises:
            Killed: it hangs, or leaves something behind.
        """
        try:
            died = 0.0
            for number, (moment, fault) in enumerate(self.faults):
                if not self._wait_for(moment if number else "step", died):
                    break
                died = time.monotonic()
                self._disturb(fault)
                self.done.append((moment, fault))
            while not self._has_ended():
                pass
        finally:
            self._launch.abandon()

    def differences(self, expected: dict[str, Any]) -> list[str]:
        """Return in what the result of the run is not the one that is expected."""
        is_over = self._deleted and not any(when > self._deleted for _, when in self._launch.steps())
        if is_over and not [*self._root.rglob("last.ckpt")]:
            # The checkpoints were deleted after the last step had been trained.
            result = json.loads((self._root / RESULT).read_text())
        else:
            result = result_of(self._root)
        return [key for key in COMPARED if key in result and result[key] != expected[key]]

    def _has_ended(self) -> bool:
        """Wait for the end of the process; start it again if the run is not over."""
        launch = self._launch
        launch.end(LIMIT_SECONDS)
        if launch.process.returncode == 0 and (self._root / RESULT).exists():
            if left := [*Path("/dev/shm").glob(f"phalanx-{launch.process.pid}-*")]:
                raise Killed(f"left in memory: {left}")
            return True
        self._again()
        return False

    def _again(self) -> None:
        self._starts += 1
        if self._starts > MOST_STARTS:
            raise Killed(f"did not end after {MOST_STARTS} starts:\n{self._launch.printed()}")
        self._launch = Training(self._root, SCRIPT, self._arguments)

    def _wait_for(self, moment: str, died: float) -> bool:
        """Wait for a moment; False if the run is over."""
        launch, choice = self._launch, self._choice
        if moment == "recovery":
            return launch.wait(choice.uniform(0.0, 0.6)) or self._continues()
        if not launch.wait_for_step(died, 1 if died else 2):
            return self._continues()
        if moment == "step":
            return launch.wait(choice.uniform(0.0, 0.3)) or self._continues()
        folders = self._copies if moment == "copy" else self._saves
        launch.wait_until(_MOMENT_SECONDS, lambda: any(not (each / MANIFEST).exists() for each in folders()))
        return launch.wait(0.0) or self._continues()

    def _continues(self) -> bool:
        """Start the run again if it has ended before its time."""
        launch = self._launch
        if launch.process.poll() is None:
            return True
        if launch.process.returncode == 0:
            return False
        launch.end(LIMIT_SECONDS)
        self._again()
        return self._launch.wait_for_step(0.0, 1)

    def _copies(self) -> list[Path]:
        return [*Path("/dev/shm").glob(f"phalanx-{self._launch.process.pid}-*/fit_*/*.ckpt")]

    def _saves(self) -> list[Path]:
        return [
            *self._root.glob("phalanx_logs/*/checkpoints/*"),
            *self._root.glob("phalanx_logs/*/checkpoints/.*.ckpt*"),
        ]

    def _disturb(self, fault: str) -> None:
        launch, choice = self._launch, self._choice
        ranks = launch.ranks()
        if fault in ("kill-launcher", "term-launcher"):
            launch.send(signal.SIGKILL if fault == "kill-launcher" else signal.SIGTERM, [launch.process.pid])
            launch.end(LIMIT_SECONDS)
            if launch.process.returncode != 0:
                self._again()
            return
        if fault == "stop" and ranks:
            victim = [choice.choice(ranks)]
            launch.send(signal.SIGSTOP, victim)
            launch.wait(0.5)
            launch.send(signal.SIGCONT, victim)
            return
        if fault.startswith("damage"):
            newest = sorted(self._copies(), key=_written)[::-1]
            for snapshot in newest[: 1 if fault == "damage-one" else 2]:
                _damage(snapshot, choice)
        if fault == "delete":
            self._deleted = time.monotonic()
            for folder in self._root.rglob("checkpoints"):
                shutil.rmtree(folder, ignore_errors=True)
        count = {"kill-two": 2, "kill-all": len(ranks)}.get(fault, 1)
        launch.send(signal.SIGKILL, choice.sample(ranks, min(len(ranks), count)))


def _written(path: Path) -> float:
    try:
        return os.stat(path / MANIFEST).st_mtime
    except OSError:
        return 0.0


def _damage(snapshot: Path, choice: random.Random) -> None:
    """Change a byte of a file of tensors."""
    try:
        files = sorted(path for path in snapshot.iterdir() if path.suffix == ".safetensors")
        path = choice.choice(files)
        with path.open("r+b") as file:
            at = choice.randrange(max(1, path.stat().st_size // 2), path.stat().st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    except (OSError, IndexError, ValueError):
        return  # it is being replaced


def _choices(given: str) -> list[tuple[str, int]]:
    return [(strategy, ranks) for strategy in given.split(",") for ranks in numbers_of_ranks(strategy, [2, 3])]


def main() -> int:
    """Run schedules from the command line; return the number of those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kinds = _choices(given.strategies)
    wrong, faults, began = 0, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        expected = {
            kind: undisturbed(Path(folder) / f"undisturbed-{number}", [kind[0], str(kind[1]), "1"])
            for number, kind in enumerate(kinds)
        }
        for number in range(given.schedules):
            seed, kind = given.seed + number, kinds[number % len(kinds)]
            root = Path(folder) / f"run-{number}"
            schedule = Schedule(root, [kind[0], str(kind[1]), "1"], random.Random(seed))
            try:
                schedule.run()
                if different := schedule.differences(expected[kind]):
                    raise Killed(f"different: {different}")
            except Killed as error:
                wrong += 1
                print(f"seed {seed}, {kind[0]} on {kind[1]}, {schedule.done}: {error}", flush=True)
            faults.update(f"{fault} in {moment}" for moment, fault in schedule.done)
            shutil.rmtree(root, ignore_errors=True)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} schedules, {sum(faults.values())} faults, {wrong} wrong", flush=True)
    seconds = time.monotonic() - began
    print(f"{given.schedules} schedules, {sum(faults.values())} faults, {wrong} wrong, {seconds:.0f} s")
    moments = Counter(name.rpartition(" ")[2] for name in faults.elements())
    kinds_of = Counter(name.partition(" ")[0] for name in faults.elements())
    for counted in (moments, kinds_of):
        print("  " + ", ".join(f"{count} {name}" for name, count in counted.most_common()))
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
