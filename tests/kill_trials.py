"""The run that is killed at random instants, ``kill_run.py``: its result, and how the results of two differ."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_run import OVER, RESULT, STARTED
from launches import Killed, Launch

from phalanx.framework.checkpoint.manifest import read_manifest
from phalanx.framework.checkpoint.verify import verify

SCRIPT = Path(__file__).with_name("kill_run.py")
MESH_RANKS = 4
"""The number of ranks of a strategy with degrees."""
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


class Training(Launch):
    """One start of the command."""

    def __init__(self, root: Path, setting: Setting) -> None:
        for mark in (STARTED, OVER):
            (root / mark).unlink(missing_ok=True)
        super().__init__(root, SCRIPT, setting.arguments)

    def wait_until_training(self) -> bool:
        """Wait until training begins; False where the run ended before."""
        return self.wait_until(LIMIT_SECONDS, (self.root / STARTED).exists)


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
    # The documents of the ranks hold the figures of the epoch so far, and so differ if the run is continued at its end.
    files = read_manifest(last).files
    result["tensors"] = {name: record.xxh3_64 for name, record in files.items() if not name.startswith("ranks-")}
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


def numbers_of_ranks(strategy: str, ranks: Sequence[int]) -> Sequence[int]:
    """Return the numbers of ranks to train a strategy on: those that were asked for, unless it fixes them."""
    if strategy == "single":
        return (1,)
    return (MESH_RANKS,) if " " in strategy else ranks
