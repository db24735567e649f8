"""Kill runs in a bucket at random instants, and continue them on an empty machine.

    python tests/bucket_trials.py --trials 100
    python tests/bucket_trials.py --trials 20 --strategies ddp --faults failing,slow,old,outage

The run is that of ``kill_trials``. A trial is one SIGKILL to all of its processes, after which the cache is deleted,
and the same command continues from what is in the bucket. After each kill all checkpoints that the bucket shows are
read and verified. At the end weights, metrics, every row of ``metrics.csv`` and the retained checkpoints must be those
of the run that nobody killed, bit for bit, and nothing of unfinished uploads may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from buckets import NAME, Bucket, Faults
from kill_run import RESULT, STARTED
from kill_trials import SCRIPT, TRAINING_SECONDS, Setting, differences, result_of, whole_run
from launches import Killed, Launch

from phalanx import checkpoint as library
from phalanx.framework.storage.cached_url import local_place
from phalanx.framework.storage.mirror import refreshed

STRATEGIES = ("ddp", "fsdp", "zero3")
LIMIT_SECONDS = 180.0
KILLS = 5
FAULTS = {
    "none": Faults(),
    "failing": Faults(failing=0.05),
    "slow": Faults(latency=0.1),
    "old": Faults(old_lists=5.0),
    "outage": Faults(outages=((12.0, 32.0),)),
}


@dataclass
class Tally:
    """Results of the trials of one strategy."""

    trials: int = 0
    identical: int = 0
    in_upload: int = 0
    verified: int = 0
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Let this process cache buckets in a folder, as another machine would; it is deleted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(folder))
        yield
        shutil.rmtree(folder, ignore_errors=True)


def verified(url: str, folder: Path) -> int:
    """Read every checkpoint below a URL; return how many there are.

    Raises:
        Killed: one of them is damaged.
    """
    with cached_in(folder):
        place = refreshed(url)
        found = sorted(place.rglob("checkpoints"))
        every = [one for each in found for one in library.checkpoints(each, verify=True)]
    if bad := [one for one in every if one.status != "good"]:
        raise Killed(f"{bad[0].path.name} is shown as {bad[0].status}: {bad[0].problem}")
    return len(every)


def unfinished(names: Sequence[str]) -> list[str]:
    """Return the tensor files of checkpoints without a manifest, or with the files of several."""
    complete = {name.rpartition("/")[0] for name in names if name.endswith("/manifest.json")}
    folders: dict[str, set[str]] = {}
    for name in names:
        if name.endswith(".safetensors"):
            checkpoint, checksum, _ = name.rsplit("/", 2)
            folders.setdefault(checkpoint, set()).add(checksum)
    return sorted(name for name, checksums in folders.items() if name not in complete or len(checksums) > 1)


def outcome(url: str, root: Path) -> dict[str, Any]:
    """Return what a finished run came to, from its bucket."""
    with cached_in(root / "reader"):
        refreshed(url)
        place = local_place(url)
        shutil.copyfile(root / RESULT, place / RESULT)
        return result_of(place)


def chain(
    bucket: Bucket, root: Path, number: int, setting: Setting, kills: int, expected: dict[str, Any], seed: int
) -> Tally:
    """Kill a run up to ``kills`` times, then let it end."""
    tally, choice = Tally(), random.Random(f"{seed}/{setting}/{number}")
    prefix = f"{setting.strategy}-{seed}-{number}"
    url, cache = f"s3://{NAME}/{prefix}", root / "cache"
    arguments = [*setting.arguments, url]
    patch = pytest.MonkeyPatch()
    patch.setenv("PHALANX_CACHE", str(cache))
    launch = Launch(root, SCRIPT, arguments)
    try:
        while tally.trials < kills:
            began = launch.wait_until(LIMIT_SECONDS, (root / STARTED).exists)
            if not (began and launch.wait(choice.uniform(0.0, 4 * TRAINING_SECONDS))):
                break
            launch.send(signal.SIGKILL, [*launch.ranks(), launch.process.pid])
            launch.end(30.0)
            tally.trials += 1
            names = bucket.names(prefix)
            tally.in_upload += bool(unfinished(names))
            shutil.rmtree(cache, ignore_errors=True)
            tally.verified += verified(url, root / "reader")
            (root / STARTED).unlink(missing_ok=True)
            launch = Launch(root, SCRIPT, arguments)
        launch.end(LIMIT_SECONDS)
        if launch.process.returncode != 0:
            raise Killed(f"exit code {launch.process.returncode}:\n{launch.printed()}")
        if left := unfinished(bucket.names(prefix)):
            raise Killed(f"left in the bucket: {left}")
        if different := differences(outcome(url, root), expected):
            raise Killed(f"different: {different}")
        tally.identical = tally.trials
    except Killed as error:
        tally.problems.append(f"{setting}, {url}, after {tally.trials} kills: {error}")
    finally:
        launch.abandon()
        patch.undo()
    return tally


def run_trials(folder: Path, strategy: str, trials: int, faults: Faults, seed: int) -> Tally:
    """Run trials of a strategy on two ranks."""
    total = Tally()
    expected, _ = whole_run(folder / "undisturbed", Setting(strategy, 2))
    number = 0
    while total.trials < trials and len(total.problems) < 3:
        setting = Setting(strategy, 2, asynchronous=number % 2 == 1)
        # The outage of each run begins some seconds after its start.
        with Bucket(faults) as bucket:
            root = folder / f"run-{number}"
            one = chain(bucket, root, number, setting, min(KILLS, trials - total.trials), expected, seed)
            shutil.rmtree(root, ignore_errors=True)
        total.trials += one.trials
        total.identical += one.identical
        total.in_upload += one.in_upload
        total.verified += one.verified
        total.problems += one.problems
        number += 1
    return total


def main() -> int:
    """Run trials from the command line; return whether any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20, help="kills for each strategy and fault")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--faults", default="none", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("strategy  faults   trials  in an upload  checkpoints verified  bit-identical  seconds", flush=True)
    failed = False
    for fault in given.faults.split(","):
        for strategy in given.strategies.split(","):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="bucket-") as folder:
                tally = run_trials(Path(folder), strategy, given.trials, FAULTS[fault], given.seed)
            print(
                f"{strategy:8}  {fault:7}  {tally.trials:6}  {tally.in_upload:12}  {tally.verified:20}  "
                f"{tally.identical:13}  {time.monotonic() - began:7.0f}",
                *tally.problems, sep="\n", flush=True,
            )  # fmt: skip
            failed = failed or bool(tally.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
