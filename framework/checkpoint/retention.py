"""Which checkpoints to keep: the best k by a score, and a second name for the newest one."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from ..atomic import HiddenDirectory, replace_directory, storage_error, sync_directory
from ..monitor import is_better


class BestK:
    """The paths of the best ``k`` checkpoints with their scores; -1 keeps all. A score of NaN is never among the best.

    Pure bookkeeping: every rank holds the same one, and nothing here touches a disk.
    """

    def __init__(self, k: int, mode: str) -> None:
        self.k = k
        self.mode = mode
        self.scores: dict[str, float] = {}

    @property
    def best(self) -> str:
        """The best path; empty while there is none."""
        return self._extreme(self.mode)

    @property
    def worst(self) -> str:
        """The path that a better one would replace; empty while there is room."""
        full = 0 < self.k <= len(self.scores)
        return self._extreme("max" if self.mode == "min" else "min") if full else ""

    def accepts(self, score: float) -> bool:
        """Whether a checkpoint with this score is to be kept."""
        if self.k == -1:
            return True
        if self.k == 0 or math.isnan(score):
            return False
        return not self.worst or is_better(score, self.scores[self.worst], self.mode)

    def add(self, path: str, score: float) -> str:
        """Take in an accepted checkpoint; return the path of the one that gives way, or an empty string."""
        gives_way = "" if path in self.scores else self.worst
        self.scores.pop(gives_way, None)
        self.scores[path] = score
        return gives_way

    def _extreme(self, mode: str) -> str:
        found = ""
        for path, score in self.scores.items():
            if not math.isnan(score) and (not found or is_better(score, self.scores[found], mode)):
                found = path
        return found


def link_files(source: Path, target: Path) -> None:
    """Fill the empty directory ``target`` with the files of ``source``, and sync it.

    They are hard links: checkpoints' files are never changed once written, so the two share their bytes and either can
    be deleted without the other. Where links are not possible the files are copied.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        for file in sorted(source.iterdir()):
            _link_or_copy(file, target / file.name)
        sync_directory(target)
    except OSError as error:
        raise storage_error("writing", target, error) from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def clone(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Publish a finished checkpoint under a second name, atomically, replacing what has that name."""
    goal = Path(target)
    held = HiddenDirectory(goal)
    try:
        link_files(Path(source), held.path)
        replace_directory(held.path, goal)
    finally:
        held.release()
