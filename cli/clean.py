"""``phalanx clean``: delete old checkpoints, or old runs, by rule."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..framework.checkpoint.deletion import remove
from ..framework.checkpoint.inspection import furthest, good_manifests
from ..framework.checkpoint.manifest import Manifest, read_manifest, run_of
from ..framework.core.errors import CheckpointError, ConfigurationError, StorageError
from ..framework.core.intervals import seconds_of
from ..framework.core.size_text import size_text
from ..framework.core.wording import counted
from ..framework.report.finding import find_runs, shown_path
from ..framework.report.run_files import RunFiles
from ..framework.report.saved import best_checkpoint
from ..framework.report.values import span_text
from ..framework.storage.mirror import delete_folder, writing
from ..framework.system.run_directory import RunDirectory, directory_at
from .terminal_text import fitted_table, say, say_json, say_wrapped


@dataclass(frozen=True)
class Old:
    """A checkpoint or a run that a rule does not keep."""

    path: Path
    kind: str
    step: int | None
    bytes: int
    changed: float
    """Seconds since 1970."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON, with the URL of what is in a bucket."""
        return {**vars(self), "path": shown_path(self.path)}


def clean(given: argparse.Namespace) -> int:
    """Delete what the rules do not keep, and print it; return the exit code."""
    if given.runs and given.older_than is None and given.keep_last is None:
        given.parser.error("--runs deletes whole runs: give --older-than SPAN, --keep-last N, or both.")
    if given.keep_last is not None and given.keep_last < (0 if given.runs else 1):
        given.parser.error(f"--keep-last {given.keep_last}: give a number from {0 if given.runs else 1} on.")
    before = time.time() - (0.0 if given.older_than is None else _seconds(given.older_than))
    root = Path(given.directory)
    deleted, passed = list[Old](), list[str]()
    for directory, olds in (_old_runs if given.runs else _old_checkpoints)(find_runs(root), given.keep_last, before):
        try:
            _delete(directory, olds, given.dry_run)
            deleted += olds
        except (CheckpointError, StorageError) as error:
            passed.append(f"{shown_path(directory.path)} is left as it is: {error}")
    _show(deleted, passed, given)
    return 0


def _old_checkpoints(
    runs: Sequence[Path], keep_last: int | None, before: float
) -> Iterator[tuple[RunDirectory, list[Old]]]:
    """Yield each run that has checkpoints beyond its newest ones and its best, with these."""
    for path in runs:
        files = RunFiles(path)
        found = [
            (manifest, place)
            for place, manifest in good_manifests(files.checkpoint_directories)
            if run_of(manifest) == files.identity
        ]
        found.sort(key=lambda each: furthest(each[0]), reverse=True)
        # last.ckpt and the checkpoint that was saved with it are one.
        states = list(dict.fromkeys(manifest.checksum for manifest, _ in found))
        kept = set(states[: 1 if keep_last is None else keep_last])
        if (best := best_checkpoint(files)) is not None:
            kept.add(read_manifest(best).checksum)
        olds = [
            _old(place, manifest)
            for manifest, place in found
            if manifest.checksum not in kept and manifest.saved_at < before
        ]
        if olds:
            yield directory_at(path), olds


def _old(place: Path, manifest: Manifest) -> Old:
    step, size = furthest(manifest)[0], sum(record.size for record in manifest.files.values())
    return Old(place, "checkpoint", step if step >= 0 else None, size, manifest.saved_at)


def _old_runs(runs: Sequence[Path], keep_last: int | None, before: float) -> Iterator[tuple[RunDirectory, list[Old]]]:
    """Yield each run that is not among the newest of its name."""
    seen: dict[Path, int] = {}
    for path in runs:
        number = seen[path.parent] = seen.get(path.parent, 0) + 1
        files, seen_at, size = RunFiles(path), list[float](), 0
        for _, manifest in good_manifests(path.rglob("checkpoints")):
            seen_at.append(manifest.saved_at)
            size += sum(record.size for record in manifest.files.values())
        seen_at += [attempt.seen for attempt in files.events.attempts]
        # Of a run in a bucket, files have the time at which they were downloaded.
        changed = max(seen_at, default=path.stat().st_mtime)
        if number > (keep_last or 0) and changed < before:
            plain = (each for each in path.rglob("*") if each.is_file() and each.suffix != ".safetensors")
            size += sum(each.stat().st_size for each in plain)
            yield directory_at(path), [Old(path, "run", None, size, changed)]


def _delete(directory: RunDirectory, olds: Sequence[Old], dry_run: bool) -> None:
    """Delete checkpoints of a run, or the run itself, under its lock.

    Raises:
        StorageError: the run is being written, or something cannot be deleted.
    """
    # No fit may begin in between.
    directory.acquire(fresh=False)
    try:
        if dry_run:
            return
        with writing(directory.path.absolute(), say_wrapped):
            for old in olds:
                if old.kind == "checkpoint":
                    remove(old.path)
                else:
                    delete_folder(directory.path.absolute())
                    shutil.rmtree(directory.path)
    finally:
        directory.release()


def _show(deleted: Sequence[Old], passed: Sequence[str], given: argparse.Namespace) -> None:
    if given.json:
        found = [old.document() for old in deleted]
        say_json({"schema": 1, "dry_run": given.dry_run, "deleted": found, "left": list(passed)})
        return
    now = time.time()
    rows = [
        [shown_path(old.path), "-" if old.step is None else f"{old.step:,}", size_text(old.bytes),
         f"{span_text(max(0.0, now - old.changed), 1)} ago"]
        for old in deleted
    ]  # fmt: skip
    if rows:
        fitted_table(("run" if given.runs else "checkpoint", "step", "size", "changed"), rows, shortened_column=0)
    what = counted(len(deleted), "run" if given.runs else "checkpoint")
    verb = "would be deleted" if given.dry_run else "deleted"
    say(f"{what} {verb}, {size_text(sum(old.bytes for old in deleted))}")
    for line in passed:
        say_wrapped(line)


def _seconds(text: str) -> float:
    seconds = seconds_of(text)
    if seconds is None:
        raise ConfigurationError(f"--older-than {text}: give a time such as 12h, 30d or 4w.")
    return seconds
