"""The command ``phalanx``. docs/command-line.md lists its exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..framework.core.errors import INTERRUPTED, PhalanxError
from ..framework.system.console import printable
from .command_parser import COMMAND, GroupedHelp, Parser, run_command
from .commands import add_commands


def build_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="phalanx",
        description="Train PyTorch models; look into their runs and checkpoints.",
        epilog="example:\n  phalanx why    why the newest run below here ended, and what resumes it",
        formatter_class=GroupedHelp,
    )
    parser.add_argument("--version", action="version", version=f"phalanx {__version__}")
    add_commands(parser.add_subparsers(dest="command", metavar=COMMAND, required=True, title="commands"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, and print one sentence on stderr if an error ends it.

    Args:
        arguments: those of the command line; None for those of the process.
    """
    try:
        given, foreign = build_parser().parse_known_args(arguments)
        if foreign:
            given.parser.error(f"unrecognized arguments: {' '.join(foreign)}")
        code = run_command(given)
        # A pipe whose reader is gone must raise here, where the error is handled, and not when the interpreter ends.
        sys.stdout.flush()
        return code
    except PhalanxError as error:
        # The message may quote names from a file, and they may contain line breaks and control characters.
        print(f"phalanx: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
