"""``phalanx checkpoint inspect | verify | list | diff | consolidate | convert``."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import checkpoint as library
from ..framework.core.errors import CheckpointError, ConfigurationError, did_you_mean
from ..framework.core.size_text import size_text
from ..framework.core.wording import counted
from ..framework.report.evaluations import current
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles, is_run
from ..framework.report.values import span_text
from .terminal_text import fitted_table, say, say_json
from .user_program import find_module

_REFUSED = CheckpointError.exit_code
_MAX_LINES = 20
_KINDS = {
    "trainer": "a Trainer's, to resume from",
    "weights": "a Trainer's weights alone",
    "fabric": "Fabric's",
    "other": "of another program",
}


def _run_of(given: str) -> RunFiles | None:
    """Return the files of the run that an argument refers to by its directory, its name or its number, if any."""
    path = Path(given)
    if path.exists():
        return RunFiles(path) if is_run(path) else None
    try:
        return RunFiles(find_run(given))
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
    say_json({"schema": 1, **vars(found)}) if given.json else _show_inspection(found)
    return 0


def verify_checkpoints(given: argparse.Namespace) -> int:
    """Read every byte of checkpoints; return the exit code: 65 if one is damaged."""
    found = {path: library.verify(_checkpoint(path)) for path in given.paths}
    if given.json:
        report = [
            {"schema": 1, "path": path, "good": not problems, "problems": problems} for path, problems in found.items()
        ]
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
            say(
                f"{path} is good: {counted(len(manifest.files), 'tensor file')}, {size_text(manifest.bytes)}, all read."
            )
            for section in manifest.sections.values():
                if section.left_out:
                    say(f"{path} leaves out {_left_out_text(section)}.")
    return _REFUSED if any(found.values()) else 0


def list_checkpoints(given: argparse.Namespace) -> int:
    """Print the checkpoints of a run or a directory; return the exit code."""
    if given.path is None:
        given.path = shown_path(find_run(None))
    files = _run_of(given.path)
    folders = [Path(given.path)] if files is None else _folders_of(files)
    found = [one for folder in folders for one in library.checkpoints(folder, verify=given.verify)]
    if given.by is not None:
        found = _ordered_by(given.by, files, found)
    if given.json:
        say_json(found)
    elif found:
        _show_list(found)
    else:
        below = [str(folder) for folder in _folders_below(Path(given.path))]
        there = f" There are some in {', '.join(below)}." if below else ""
        say(f"{given.path} holds no checkpoints.{there}")
    return _REFUSED if given.verify and any(one.status == "damaged" for one in found) else 0


def _ordered_by(name: str, files: RunFiles | None, found: list[Any]) -> list[Any]:
    """Return checkpoints in the order of a result of ``phalanx eval``, which is their metric; those without it first.

    Raises:
        ConfigurationError: no checkpoint of the run has such a result.
    """
    known = [] if files is None else current(files.evaluations, files.events)
    results = {each.step: each.values[name] for each in known if name in each.values}
    if not results:
        names = sorted({each for evaluation in known for each in evaluation.values})
        raise ConfigurationError(
            f"--by {name}: no checkpoint has such a result of `phalanx eval`.{did_you_mean(name, names)} "
            f"Known: {', '.join(names) or 'none'}."
        )
    with_results = [replace(one, metric=(name, results[one.step]) if one.step in results else None) for one in found]
    return sorted(with_results, key=lambda one: -math.inf if one.metric is None else one.metric[1])


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
        held = "-" if one.bytes is None else size_text(one.bytes)
        old = "-" if one.saved_at is None else span_text(max(0.0, now - one.saved_at), 1)
        rows.append([one.path.name, step, epoch, metric, held, old, one.status + what])
    fitted_table(["name", "step", "epoch", "metric", "size", "age", "state"], rows)
    for one in found:
        if one.problem is not None:
            say(f"{one.path.name}: {one.problem}")


def diff_checkpoints(given: argparse.Namespace) -> int:
    """Print the differences between two checkpoints; return the exit code: 65 if there are any."""
    found = library.diff(_checkpoint(given.path), _checkpoint(given.other))
    if given.json:
        say_json({"schema": 1, "equal": found.equal, "sections": found.sections, "documents": found.documents})
    else:
        _show_difference(found)
    return 0 if found.equal else _REFUSED


def consolidate_checkpoint(given: argparse.Namespace) -> int:
    """Write the weights of a checkpoint as plain safetensors; return the exit code."""
    out = library.consolidate(_checkpoint(given.path), given.out, given.max_shard_size, given.dtype, given.section)
    say_json({"schema": 1, "path": str(out)}) if given.json else say(f"wrote {out}")
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
    say_json({"schema": 1, "path": str(out), "notes": notes}) if given.json else say(f"wrote {out}")
    return 0


# ---- text -----------------------------------------------------------------------------------------------------------


def _show_inspection(found: Any) -> None:
    """Print what ``inspect`` returned."""
    say(found.path)
    ranks = f"{counted(found.world_size, 'rank')}, {'sharded' if found.sharded else 'written by rank 0'}"
    way = [part for part in (found.strategy, found.precision, ranks) if part]
    _line("saved", f"{moment(found.saved_at)} by phalanx {found.phalanx}, format {found.format_version}")
    _line("kind", _KINDS.get(found.kind, found.kind))
    _line("strategy", ", ".join(way))
    if found.module:
        _line("module", found.module)
    counters = (("epoch", found.epoch), ("batch", found.batch), ("step", found.step))
    if reached := [f"{name} {value}" for name, value in counters if value is not None]:
        _line("progress", ", ".join(reached))
    _line("weights", "all finite" if found.finite else f"{found.nonfinite!r} is not finite")
    for name, section in found.sections.items():
        tied = f" ({section.tied} tied to others)" if section.tied else ""
        kinds = ", ".join(f"{code} {size_text(count)}" for code, count in section.bytes_by_dtype.items())
        what = f"{counted(section.tensors, 'tensor')}{tied}, {counted(section.elements, 'element')}"
        _line(name, f"{what}, {size_text(section.bytes)}{f': {kinds}' if kinds else ''}")
        if section.left_out:
            _line("left out", _left_out_text(section))
    for index, optimizer in enumerate(found.optimizers):
        for number, group in enumerate(optimizer.groups):
            hyper = {key: value for key, value in group.items() if key != "parameters"}
            where = f"optimizer {index}, group {number}"
            _line(where, f"{optimizer.kind}, {counted(group['parameters'], 'parameter')}: {_pairs(hyper)}")
    for title, values in (("hparams", found.hparams), ("metrics", found.metrics)):
        if values:
            _line(title, _pairs(values))
    if found.unsaved_hparams:
        _line("not saved", ", ".join(found.unsaved_hparams))
    for name, count in found.files.items():
        _line("file", f"{name}, {size_text(count)}")


def _left_out_text(section: Any) -> str:
    """Return the number of weights that a checkpoint leaves out, and where they are."""
    what = f"{counted(section.left_out, 'frozen tensor')} of {counted(section.left_out_elements, 'element')}"
    return f"{what}: the base that the module is built with, known by a fingerprint of each"


def _show_difference(found: Any) -> None:
    """Print what ``diff`` returned."""
    if found.equal:
        tensors = sum(section.same for section in found.sections.values())
        say(f"equal: {counted(tensors, 'tensor')}, and everything else")
        return
    for name, section in found.sections.items():
        say(f"{name}: {counted(section.same, 'tensor')} equal")
        _some("only in the first", section.only_in_first)
        _some("only in the second", section.only_in_second)
        _some("another shape", [f"{key}: {a} and {b}" for key, (a, b) in section.shapes.items()])
        _some("another dtype", [f"{key}: {a} and {b}" for key, (a, b) in section.dtypes.items()])
        _some("other values", [_values(key, value) for key, value in section.values.items()])
        _some("other values, left out", section.fingerprints)
    if found.documents:
        say("other values:")
    _some("differs", [f"{path}: {a} and {b}" for path, a, b in found.documents])


def _values(name: str, found: Any) -> str:
    return f"{name}: {found.different:,} of {counted(found.elements, 'element')}, by up to {found.max_abs:.6g}"


def _some(what: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    for line in lines[:_MAX_LINES]:
        say(f"  {what}: {line}")
    if len(lines) > _MAX_LINES:
        say(f"  {what}: {len(lines) - _MAX_LINES:,} more, all of them with --json")


def _line(title: str, text: str) -> None:
    say(f"  {title:<10} {text}")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict) and value.get("$") in ("tuple", "float", "scalar", "numpy", "dtype", "path"):
        value = value.get("items", value.get("value"))
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def moment(seconds: float) -> str:
    """Return seconds since 1970 as a date and time, UTC."""
    # Times far in the future have a year of five digits, which datetime does not support.
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(seconds, 253_402_300_799)))
