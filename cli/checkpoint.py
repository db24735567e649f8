"""``phalanx checkpoint inspect | verify | list | diff | consolidate | convert``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from .. import checkpoint as library
from ..framework.core.errors import CheckpointError, ConfigurationError
from ..framework.core.wording import counted
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles, is_run
from .output import age, left_out_text, say, say_json, show_difference, show_inspection, size, table
from .user_module import find_module

_REFUSED = CheckpointError.exit_code


def _run_of(given: str) -> RunFiles | None:
    """Return the files of the run that an argument refers to by its directory, its name or its number, if any."""
    path = Path(given)
    if path.exists():
        return RunFiles(path) if is_run(path) else None
    try:
        return RunFiles(find_run(given, Path()))
    except ConfigurationError:
        return None


def _folders_of(files: RunFiles) -> list[Path]:
    """Return the existing directories of a run's checkpoints."""
    return [folder for folder in dict.fromkeys(files.checkpoint_directories) if folder.is_dir()]


def _checkpoint(given: str) -> str:
    """Return an argument that refers to a checkpoint, or to nothing at all, which the library refuses.

    Raises:
        CheckpointError: it refers to a run.
    """
    if (files := None if library.is_complete(given) else _run_of(given)) is None:
        return given
    places = ", ".join(map(shown_path, _folders_of(files))) or "none of its directories"
    raise CheckpointError(
        f"{given!r} is a run and not a checkpoint: its checkpoints are in {places}; `phalanx checkpoint list {given}` "
        "shows them."
    )


def inspect_checkpoint(given: argparse.Namespace) -> int:
    """Print what a checkpoint holds; return the exit code."""
    found = library.inspect(_checkpoint(given.path))
    say_json(found) if given.json else show_inspection(found)
    return 0


def verify_checkpoints(given: argparse.Namespace) -> int:
    """Read every byte of checkpoints; return the exit code: 65 if one is damaged."""
    found = {path: library.verify(_checkpoint(path)) for path in given.paths}
    if given.json:
        report = [{"path": path, "good": not problems, "problems": problems} for path, problems in found.items()]
        say_json(report[0] if len(report) == 1 else report)
    for path, problems in found.items():
        if problems:
            more = f" That is the first of {len(problems)} problems." if len(problems) > 1 else ""
            if len(found) == 1:
                raise CheckpointError(problems[0] + more)
            if not given.json:
                say(f"{path} is damaged: {problems[0]}{more}")
        elif not given.json:
            manifest = library.inspect(path)
            say(f"{path} is good: {counted(len(manifest.files), 'tensor file')}, {size(manifest.bytes)}, all read.")
            for section in manifest.sections.values():
                if section.left_out:
                    say(f"{path} leaves out {left_out_text(section)}.")
    return _REFUSED if any(found.values()) else 0


def list_checkpoints(given: argparse.Namespace) -> int:
    """Print the checkpoints of a run or a directory; return the exit code."""
    if given.path is None:
        given.path = shown_path(find_run(None, Path()))
    files = _run_of(given.path)
    folders = [Path(given.path)] if files is None else _folders_of(files)
    found = [one for folder in folders for one in library.checkpoints(folder, verify=given.verify)]
    if given.json:
        say_json(found)
    elif found:
        _show_list(found)
    else:
        below = [str(folder) for folder in _folders_below(Path(given.path))]
        there = f" There are some in {', '.join(below)}." if below else ""
        say(f"{given.path} holds no checkpoints.{there}")
    return _REFUSED if given.verify and any(one.status == "damaged" for one in found) else 0


def _folders_below(folder: Path) -> list[Path]:
    """Return the checkpoint directories of a run, or of the runs of a name."""
    patterns = ("checkpoints", "version_*/checkpoints", "*/version_*/checkpoints")
    found = [place for pattern in patterns for place in sorted(folder.glob(pattern))]
    return [place for place in found if place.is_dir() and library.checkpoints(place)]


def _show_list(found: list[Any]) -> None:
    now = time.time()
    rows = []
    for one in found:
        metric = f"{one.metric[0]}={one.metric[1]:.6g}" if one.metric is not None else "-"
        step, epoch = ("-" if value is None else str(value) for value in (one.step, one.epoch))
        what = {"weights": ", weights alone", "fabric": ", Fabric"}.get(one.kind or "", "")
        held = "-" if one.bytes is None else size(one.bytes)
        old = "-" if one.saved_at is None else age(now - one.saved_at)
        rows.append([one.path.name, step, epoch, metric, held, old, one.status + what])
    table(["name", "step", "epoch", "metric", "size", "age", "state"], rows)
    for one in found:
        if one.problem is not None:
            say(f"{one.path.name}: {one.problem}")


def diff_checkpoints(given: argparse.Namespace) -> int:
    """Print the differences between two checkpoints; return the exit code: 65 if there are any."""
    found = library.diff(_checkpoint(given.path), _checkpoint(given.other))
    if given.json:
        say_json({"equal": found.equal, "sections": found.sections, "documents": found.documents})
    else:
        show_difference(found)
    return 0 if found.equal else _REFUSED


def consolidate_checkpoint(given: argparse.Namespace) -> int:
    """Write the weights of a checkpoint as plain safetensors; return the exit code."""
    out = library.consolidate(_checkpoint(given.path), given.out, given.max_shard_size, given.dtype, given.section)
    say_json({"path": str(out)}) if given.json else say(f"wrote {out}")
    return 0


def convert_checkpoint(given: argparse.Namespace) -> int:
    """Make a checkpoint from one of another framework; return the exit code."""
    notes: list[str] = []
    module = None if given.module is None else find_module(given.module)
    out = library.convert(
        given.path,
        given.out,
        given.format,
        module=module,
        prefix=given.prefix,
        leave_out=given.leave_out,
        trust=given.trust,
        note=notes.append if given.json else say,
    )
    say_json({"path": str(out), "notes": notes}) if given.json else say(f"wrote {out}")
    return 0
