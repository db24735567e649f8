"""``phalanx checkpoint inspect | verify | list | diff | consolidate | convert``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import checkpoint as library
from ..framework.core.errors import CheckpointError, ConfigurationError
from ..framework.core.wording import counted
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles, is_run
from .command_parser import add_command
from .output import age, left_out_text, say, say_json, show_difference, show_inspection, size, table
from .user_module import find_module

_REFUSED = CheckpointError.exit_code


def add_commands(commands: Any) -> None:
    """Add ``checkpoint`` and its subcommands to the subparsers of a parser."""
    text = "look into, check, compare and convert checkpoints"
    own = commands.add_parser("checkpoint", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = own.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    _inspect(verbs)
    _verify(verbs)
    _list(verbs)
    _diff(verbs)
    _consolidate(verbs)
    _convert(verbs)


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


_EXAMPLES = {
    "inspect": "runs/version_3/checkpoints/last.ckpt",
    "verify": "runs/version_3/checkpoints/*.ckpt",
    "list": "runs/version_3/checkpoints --verify",
    "diff": "epoch=3-step=64.ckpt last.ckpt",
    "consolidate": "last.ckpt model.safetensors --dtype bf16",
    "convert": "lightning.ckpt resumable.ckpt --module models:GPT",
}


def _verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    return add_command(verbs, name, run, text, f"phalanx checkpoint {name} {_EXAMPLES[name]}")


def _inspect(verbs: Any) -> None:
    def run(given: argparse.Namespace) -> int:
        found = library.inspect(_checkpoint(given.path))
        say_json(found) if given.json else show_inspection(found)
        return 0

    _verb(verbs, "inspect", run, "show what a checkpoint holds").add_argument("path", help="a checkpoint")


def _verify(verbs: Any) -> None:
    def run(given: argparse.Namespace) -> int:
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

    text = "read every byte of checkpoints and compare it with the checksums"
    _verb(verbs, "verify", run, text).add_argument("paths", nargs="+", metavar="path", help="a checkpoint")


def _list(verbs: Any) -> None:
    def run(given: argparse.Namespace) -> int:
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

    parser = _verb(verbs, "list", run, "list the checkpoints of a run or a directory, the furthest last")
    parser.add_argument("path", metavar="RUN", help="a run's directory or name, or a directory that holds checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every byte; the exit code is 65 if one is damaged")


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


def _diff(verbs: Any) -> None:
    def run(given: argparse.Namespace) -> int:
        found = library.diff(_checkpoint(given.path), _checkpoint(given.other))
        if given.json:
            say_json({"equal": found.equal, "sections": found.sections, "documents": found.documents})
        else:
            show_difference(found)
        return 0 if found.equal else _REFUSED

    parser = _verb(verbs, "diff", run, "compare two checkpoints; the exit code is 65 if they differ")
    parser.add_argument("path", help="a checkpoint")
    parser.add_argument("other", help="another one")


def _consolidate(verbs: Any) -> None:
    def run(given: argparse.Namespace) -> int:
        out = library.consolidate(_checkpoint(given.path), given.out, given.max_shard_size, given.dtype, given.section)
        say_json({"path": str(out)}) if given.json else say(f"wrote {out}")
        return 0

    parser = _verb(verbs, "consolidate", run, "write the weights of a checkpoint as plain safetensors")
    parser.add_argument("path", help="a checkpoint")
    parser.add_argument("out", help="a file, or with --max-shard-size a directory, that does not exist yet")
    parser.add_argument("--dtype", help="write floating point tensors as bf16, float16, float32, ...")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split into files of at most this size, such as 5GB")
    parser.add_argument("--section", default="model", help="what to write: model, averages/<key>, optimizer, ...")


def _convert(verbs: Any) -> None:
    def run(given: argparse.Namespace) -> int:
        notes: list[str] = []
        module = None if given.module is None else find_module(given.module)
        out = library.convert(
            given.path,
            given.out,
            given.format,
            module=module,
            prefix=given.prefix,
            leave_out=given.leave_out,
            note=notes.append if given.json else say,
        )
        say_json({"path": str(out), "notes": notes}) if given.json else say(f"wrote {out}")
        return 0

    parser = _verb(verbs, "convert", run, "make a checkpoint from one of Lightning, Accelerate or DeepSpeed")
    parser.add_argument("path", help="the foreign file or folder")
    parser.add_argument("out", help="the checkpoint to make; nothing may be there")
    parser.add_argument("--format", help="the format, if it is not recognised: lightning, accelerate, deepspeed, ...")
    parser.add_argument("--module", metavar="MODULE:CLASS", help="the module's class, where names are not certain")
    parser.add_argument("--prefix", default="", help="prefix to add to the names of weights, such as net.")
    parser.add_argument(
        "--leave-out", metavar="CLASS", action="append", default=[], help="a class whose objects are left out"
    )
