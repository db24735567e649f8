"""Arguments of the commands for a new machine. The module of a command is imported when the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from . import examine

CHECK_FAILED = 69


def add_commands(commands: Any) -> None:
    """Add ``doctor`` to the subparsers of a parser."""
    text = "check this machine: software, disk, limits, ranks, GPUs, DeepSpeed"
    parser = commands.add_parser(
        "doctor",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. The exit code is {CHECK_FAILED} if a check fails.",
        epilog="example:\n  phalanx doctor runs --ranks 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=examine, parser=parser)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where runs will be (default: here)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of a run on this machine (default: 8)")
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's ops that are missing")
    parser.add_argument("--paste", action="store_true", help="also print what belongs into a report of a defect")
    parser.add_argument("--json", action="store_true", help="print JSON")
