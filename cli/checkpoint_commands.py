"""Arguments of ``phalanx checkpoint``. The module of its verbs is imported when one of them runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from . import (
    consolidate_checkpoint,
    convert_checkpoint,
    diff_checkpoints,
    inspect_checkpoint,
    list_checkpoints,
    verify_checkpoints,
)
from .command_parser import add_command

_EXAMPLES = {
    "inspect": "runs/version_3/checkpoints/last.ckpt",
    "verify": "runs/version_3/checkpoints/*.ckpt",
    "list": "runs/version_3/checkpoints --verify",
    "diff": "epoch=3-step=64.ckpt last.ckpt",
    "consolidate": "last.ckpt model.safetensors --dtype bf16",
    "convert": "lightning.ckpt resumable.ckpt --module models:GPT",
}


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


def _verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    return add_command(verbs, name, run, text, f"phalanx checkpoint {name} {_EXAMPLES[name]}")


def _inspect(verbs: Any) -> None:
    _verb(verbs, "inspect", inspect_checkpoint, "show what a checkpoint holds").add_argument(
        "path", help="a checkpoint"
    )


def _verify(verbs: Any) -> None:
    text = "read every byte of checkpoints and compare it with the checksums"
    _verb(verbs, "verify", verify_checkpoints, text).add_argument(
        "paths", nargs="+", metavar="path", help="a checkpoint"
    )


def _list(verbs: Any) -> None:
    parser = _verb(verbs, "list", list_checkpoints, "list the checkpoints of a run or a directory, the furthest last")
    text = "a run's directory or name, or a directory that holds checkpoints (default: the newest run below here)"
    parser.add_argument("path", metavar="RUN", nargs="?", help=text)
    parser.add_argument("--verify", action="store_true", help="read every byte; the exit code is 65 if one is damaged")


def _diff(verbs: Any) -> None:
    parser = _verb(verbs, "diff", diff_checkpoints, "compare two checkpoints; the exit code is 65 if they differ")
    parser.add_argument("path", help="a checkpoint")
    parser.add_argument("other", help="another one")


def _consolidate(verbs: Any) -> None:
    parser = _verb(
        verbs, "consolidate", consolidate_checkpoint, "write the weights of a checkpoint as plain safetensors"
    )
    parser.add_argument("path", help="a checkpoint")
    parser.add_argument("out", help="a file, or with --max-shard-size a directory, that does not exist yet")
    parser.add_argument("--dtype", help="write floating point tensors as bf16, float16, float32, ...")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split into files of at most this size, such as 5GB")
    parser.add_argument("--section", default="model", help="what to write: model, averages/<key>, optimizer, ...")


def _convert(verbs: Any) -> None:
    parser = _verb(
        verbs, "convert", convert_checkpoint, "make a checkpoint from one of Lightning, Accelerate or DeepSpeed"
    )
    parser.add_argument("path", help="the foreign file or folder")
    parser.add_argument("out", help="the checkpoint to make; nothing may be there")
    parser.add_argument("--format", help="the format, if it is not recognised")
    parser.add_argument("--module", metavar="MODULE:CLASS", help="the module's class, where names are not certain")
    parser.add_argument("--prefix", default="", help="prefix to add to the names of weights, such as net.")
    parser.add_argument(
        "--leave-out", metavar="CLASS", action="append", default=[], help="a class whose objects are left out"
    )
    parser.add_argument("--trust", action="store_true", help="unpickle all they name: it can run any code")
