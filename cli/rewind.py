"""``phalanx rewind``: makes a run continue from an earlier step, without some of the data after it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from ..framework.checkpoint.inspection import furthest, newest_complete
from ..framework.checkpoint.manifest import Manifest, read_manifest
from ..framework.checkpoint.verify import verify
from ..framework.core.data_spans import Span, joined
from ..framework.core.errors import CheckpointError, ConfigurationError
from ..framework.core.wording import counted
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.rewinds import COMMAND, Rewind, add_rewind
from ..framework.report.run_files import RunFiles
from ..framework.report.saved import saved_checkpoints
from ..framework.report.step_data import data_of_step
from ..framework.resume.checkpoint_search import not_resumable, only_of
from ..framework.storage.mirror import writing
from ..framework.system.run_directory import directory_at
from .terminal_text import say_json, say_wrapped

_STEPS = re.compile(r"(\d+)(?::(\d+))?$")


def rewind_run(given: argparse.Namespace) -> int:
    """Go back, and print what the next fit does; return the exit code."""
    path = find_run(given.given_run)
    skipped = [_steps(text) for text in given.skip]
    if given.to is None and not skipped:
        raise ConfigurationError("give --to N, --skip A:B, or both.")
    directory = directory_at(path)
    # No fit may begin in between.
    directory.acquire(fresh=False)
    try:
        with writing(path.absolute(), say_wrapped):
            target, rewind, moved = _go_back(RunFiles(path), given.to, skipped)
    finally:
        directory.release()
    resume = build_report(RunFiles(path))["why"]["resume"] or 'fit(..., ckpt_path="auto") continues the run'
    if given.json:
        found = {"checkpoint": str(target), "step": rewind.to_step, "left_out": rewind.left_out, "moved": moved}
        say_json({"schema": 1, "path": str(path), **found, "resume": resume})
        return 0
    say_wrapped(
        f"{shown_path(path)} goes back from step {rewind.from_step:,} to step {rewind.to_step:,}: {target.name}"
    )
    if rewind.left_out:
        say_wrapped(f"left out from now on: {', '.join(map(str, rewind.left_out))}")
    for folder in dict.fromkeys(place.parent for place in moved):
        count = sum(place.parent == folder for place in moved)
        say_wrapped(f"set aside: {counted(count, 'newer checkpoint')}, in {shown_path(folder)}")
    say_wrapped(f"resume: {resume}")
    return 0


def _go_back(files: RunFiles, to: int | None, skipped: Sequence[range]) -> tuple[Path, Rewind, list[Path]]:
    """Record a rewind; return the checkpoint, the record, and where the newer checkpoints are now.

    Args:
        files: those of the run.
        to: the step to go back to; None for the first one of ``skipped``.
        skipped: the steps whose data is left out.
    """
    wanted = min(steps.start for steps in skipped) if to is None else to
    reached = max((each.reached for each in files.events.attempts), default=0)
    if not 0 <= wanted <= reached:
        raise ConfigurationError(f"step {wanted}: the run has made {counted(reached, 'step')}, counted from 0.")
    target = _checkpoint_at(wanted, files)
    step = furthest(read_manifest(target))[0]
    spans = joined(span for steps in skipped for span in _data_of(steps, step, files, reached))
    rewind = Rewind(COMMAND, reached, step, target.name, spans)
    return target, rewind, add_rewind(files.directory, files.checkpoint_directories, target, rewind)


def _steps(text: str) -> range:
    """Read ``A:B`` or ``A``."""
    match = _STEPS.match(text)
    first, stop = (int(match[1]), int(match[2] or int(match[1]) + 1)) if match else (0, 0)
    if first >= stop:
        raise ConfigurationError(f"--skip {text}: give steps as A:B, from A up to but not including B, or one step A.")
    return range(first, stop)


def _checkpoint_at(step: int, files: RunFiles) -> Path:
    """Return the newest checkpoint of the run from which it can continue at or before a step.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    of_run = only_of(files.identity, not_resumable)

    def refused(manifest: Manifest) -> str | None:
        return "it is later." if furthest(manifest)[0] > step else of_run(manifest)

    found = newest_complete(files.checkpoint_directories, refused)
    if found is None:
        steps = ", ".join(str(row["step"]) for row in saved_checkpoints(files).rows if row["complete"])
        raise CheckpointError(
            f"{shown_path(files.directory)} has no checkpoint at or before step {step}. Its newest checkpoints have "
            f"these steps: {steps or 'none'}."
        )
    if problems := verify(found):
        raise CheckpointError(f"{found.name} is damaged, so move it away and try again: {problems[0]}")
    return found


def _data_of(steps: range, target: int, files: RunFiles, reached: int) -> list[Span]:
    """Return the data of steps that are made again from step ``target`` on.

    Raises:
        ConfigurationError: a step is before it.
        DataError: the run has not reached a step, or left no record of its data.
    """
    if steps.start < target:
        raise ConfigurationError(
            f"--skip {steps.start}:{steps.stop} begins before step {target}, to which the run goes back: give a "
            "smaller --to, or none."
        )
    return [
        Span(data.epoch, data.positions.start, data.positions.stop, data.unit)
        for step in steps
        for data in data_of_step(files.events.marks, step, reached)
    ]
