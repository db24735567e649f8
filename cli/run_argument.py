"""The arguments that the commands which look at runs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..framework.report.finding import find_run

_RUN = "a run's directory or its name, such as version_3 or 3; by default the newest run below this directory"


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command with ``--json`` and an example in its help."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. It reads files alone, also those of a run that is training.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN."""
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)


def run_of(given: str | None) -> Path:
    """Return the directory of the run that an argument names.

    Raises:
        ConfigurationError: there is no such run.
    """
    return find_run(given, Path())
