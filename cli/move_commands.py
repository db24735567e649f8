"""Arguments of the commands that move programs to phalanx. A command's own module is imported when it runs."""

from __future__ import annotations

from typing import Any

from . import export_model, migrate_files
from .command_parser import add_command

WEIGHTS, PROGRAM = ".safetensors", ".pt2"


def add_commands(commands: Any) -> None:
    """Add ``migrate`` and ``export`` to the subparsers of a parser."""
    _migrate(commands)
    _export(commands)


def _migrate(commands: Any) -> None:
    parser = add_command(
        commands, "migrate", migrate_files,
        "rewrite scripts of Lightning and Accelerate for phalanx",
        "phalanx migrate train.py config.yaml --write",
        "Prints the differences, and what is left to you.",
    )  # fmt: skip
    parser.add_argument("files", metavar="FILE", nargs="+", help="scripts, YAML configurations, or directories of them")
    parser.add_argument("--write", action="store_true", help="apply the changes instead of printing them")


def _export(commands: Any) -> None:
    parser = add_command(
        commands, "export", export_model,
        "write the weights of a run for other programs, or its model as a program",
        "phalanx export version_3 model.safetensors --dtype bf16",
        "Of a run, the best checkpoint is taken, or else the last one.",
    )  # fmt: skip
    parser.add_argument("source", metavar="FROM", help="a checkpoint, or a run's directory or name")
    parser.add_argument("out", metavar="OUT", help=f"{WEIGHTS}: its weights; {PROGRAM}: a program")
    add = parser.add_argument
    add("--dtype", metavar="TYPE", help="bf16, float16, ... (default: as they are)")
    add("--max-shard-size", metavar="SIZE", help="split the weights into files, such as 5GB")
    add("--average", metavar="NAME", help="an average of the weights, such as ema")
    add("--module", metavar="MODULE:CLASS", help="the module's class, for a program")
