"""The command ``phalanx``: parses arguments, returns an exit code, and prints one sentence on stderr if it is not 0.

0    done, good, equal
65   a checkpoint is refused or damaged, or two checkpoints differ
69   a check of this machine has failed
74   a file or directory cannot be written
78   the arguments are wrong
130  interrupted
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..framework.core.errors import ConfigurationError, PhalanxError, did_you_mean
from . import begin_commands, checkpoint, look_commands
from .output import printable

_CHOICE = re.compile(r"argument (?P<what>.+): invalid choice: (?P<given>'.*') \(choose from (?P<known>.*)\)")
_FOREIGN = re.compile(r"unrecognized arguments: (?P<given>\S+).*")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence with the closest match, and exits with code 78."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self._sentence(message)} Try '{self.prog} --help'.")

    def _sentence(self, message: str) -> str:
        if match := _CHOICE.fullmatch(message):
            known = re.findall(r"[\w-]+", match["known"])
            given = match["given"].strip("'")
            return f"{given!r} is not a known {match['what']}.{did_you_mean(given, known)} Known: {', '.join(known)}."
        if match := _FOREIGN.fullmatch(message):
            options = [option for action in self._actions for option in action.option_strings]
            return f"{match['given']!r} is not known here.{did_you_mean(match['given'], options)}"
        return f"{message}."


def build_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="phalanx",
        description="Train PyTorch models; look into their runs and checkpoints.",
        epilog="example:\n  phalanx why    why the newest run below this directory ended, and what resumes it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"phalanx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for each in (begin_commands, look_commands, checkpoint):
        each.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. ``arguments`` default to those of the process."""
    try:
        given, foreign = build_parser().parse_known_args(arguments)
        if foreign:
            given.parser.error(f"unrecognized arguments: {' '.join(foreign)}")
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except PhalanxError as error:
        # One line, whatever names a hostile file put into it.
        print(f"phalanx: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader closed the pipe. Nothing must be left to flush when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
