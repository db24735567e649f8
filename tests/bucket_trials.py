"""A run in a bucket that is killed at a random instant, and continued on an empty machine.

The run is that of ``kill_trials``. A SIGKILL ends all of its processes, the cache is deleted, and the same command
continues from what is in the bucket. After the kill all checkpoints that the bucket shows are read and verified. At the
end weights, metrics, every row of ``metrics.csv`` and the retained checkpoints must be those of the run that nobody
killed, bit for bit, and nothing of unfinished uploads may be left.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from buckets import NAME, Bucket
from kill_run import RESULT, STARTED
from kill_trials import SCRIPT, TRAINING_SECONDS, Setting, differences, result_of, whole_run
from launches import Killed, Launch

from phalanx import checkpoint as library
from phalanx.framework.storage.cached_url import local_place
from phalanx.framework.storage.mirror import refreshed

LIMIT_SECONDS = 180.0


@contextlib.contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Let this process cache buckets in a folder, as another machine would; it is deleted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(folder))
        yield
        shutil.rmtree(folder, ignore_errors=True)


def check_checkpoints(url: str, folder: Path) -> None:
    """Read every checkpoint below a URL.

    Raises:
        Killed: one of them is damaged.
    """
    with cached_in(folder):
        place = refreshed(url)
        found = sorted(place.rglob("checkpoints"))
        every = [one for each in found for one in library.checkpoints(each, verify=True)]
    if bad := [one for one in every if one.status != "good"]:
        raise Killed(f"{bad[0].path.name} is shown as {bad[0].status}: {bad[0].problem}")


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


def kill_and_continue(folder: Path, strategy: str, seed: int) -> None:
    """Kill a run on two ranks, and let it end on an empty machine.

    Raises:
        Killed: the end is not that of the run that nobody killed, or a checkpoint was damaged.
    """
    choice, setting = random.Random(seed), Setting(strategy, 2)
    expected, _ = whole_run(folder / "undisturbed", setting)
    root, url = folder / "run", f"s3://{NAME}/run"
    arguments = [*setting.arguments, url]
    with Bucket() as bucket, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(root / "cache"))
        launch = Launch(root, SCRIPT, arguments)
        try:
            launch.wait_until(LIMIT_SECONDS, (root / STARTED).exists)
            if not launch.wait(choice.uniform(0.0, TRAINING_SECONDS)):
                raise Killed(f"the run ended before it was killed:\n{launch.printed()}")
            launch.send(signal.SIGKILL, [*launch.ranks(), launch.process.pid])
            launch.end(30.0)
            shutil.rmtree(root / "cache", ignore_errors=True)
            check_checkpoints(url, root / "reader")
            launch = Launch(root, SCRIPT, arguments)
            launch.end(LIMIT_SECONDS)
            if launch.process.returncode != 0:
                raise Killed(f"exit code {launch.process.returncode}:\n{launch.printed()}")
            if left := unfinished(bucket.names("run")):
                raise Killed(f"left in the bucket: {left}")
            if different := differences(outcome(url, root), expected):
                raise Killed(f"different: {different}")
        finally:
            launch.abandon()
