"""``phalanx export``: the weights of a run or a checkpoint as a file for other programs, or the model as a program."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import checkpoint as library
from ..framework.checkpoint.safetensors_export import validated_average
from ..framework.core.errors import CheckpointError, ConfigurationError, did_you_mean
from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles
from ..framework.resume.export_program import export_program
from .commands import PROGRAM, WEIGHTS
from .terminal_text import say, say_json
from .user_program import find_module


def export_model(given: argparse.Namespace) -> int:
    """Write the file; return the exit code."""
    out = Path(given.out)
    _check(given, out)
    checkpoint = _checkpoint(given.source)
    if out.suffix == PROGRAM:
        written = export_program(find_module(given.module), checkpoint, out, given.average)
    else:
        section = "model" if given.average is None else f"averages/{given.average}"
        written = library.consolidate(checkpoint, out, given.max_shard_size, given.dtype, section)
    if given.json:
        say_json({"schema": 1, "checkpoint": checkpoint, "path": written})
    else:
        say(f"wrote {shown_path(Path(written))} from {shown_path(checkpoint)}")
        validated = validated_average(library.open_checkpoint(checkpoint)) if given.average is None else None
        if validated is not None:
            say(f"note: the run was validated with the average {validated!r}, which --average {validated} writes")
    return 0


def _check(given: argparse.Namespace, out: Path) -> None:
    """Refuse a combination of arguments before any file is read."""
    if given.max_shard_size is None and out.suffix not in (WEIGHTS, PROGRAM) and not out.is_dir():
        raise ConfigurationError(
            f"{given.out!r} must end in {WEIGHTS} for weights, or in {PROGRAM} for a program."
            f"{did_you_mean(out.suffix, [WEIGHTS, PROGRAM])}"
        )
    if out.suffix == PROGRAM and given.module is None:
        raise ConfigurationError(f"{given.out!r} needs the class of the module: give --module package.module:Class.")
    if out.suffix == PROGRAM and (given.dtype or given.max_shard_size):
        raise ConfigurationError(f"--dtype and --max-shard-size are for {WEIGHTS} files.")
    if out.suffix != PROGRAM and given.module is not None:
        raise ConfigurationError(f"--module is for {PROGRAM} files: weights need none.")


def _checkpoint(given: str) -> Path:
    """Return the path of a checkpoint, or of the best one of a run; without a best one, of its last one.

    Raises:
        CheckpointError: the run has no complete checkpoint.
        ConfigurationError: there is no such checkpoint or run.
    """
    if library.is_complete(given):
        return Path(given)
    directory = find_run(given)
    report = build_report(RunFiles(directory))
    newest = report["resume_from"]
    for path in (report["best_checkpoint"], report["last_checkpoint"], newest and newest["path"]):
        if path and library.is_complete(path):
            return Path(path)
    raise CheckpointError(f"The run {shown_path(directory)!r} has no complete checkpoint to export.")
