"""The command ``phalanx``: parses arguments, returns an exit code, and prints one sentence on stderr if it is not 0.

0    done, good, equal
65   a checkpoint is refused or damaged, two checkpoints differ, or a script to migrate is not Python
69   a check has failed, or a run does not fit into memory
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
from itertools import chain
from typing import Any, NoReturn

from .. import __version__
from ..framework.core.errors import ConfigurationError, PhalanxError, did_you_mean
from . import begin_commands, checkpoint_commands, launch_commands, look_commands, move_commands, run_commands
from .command_parser import GroupedHelp, grouped
from .other_names import suggestion
from .output import printable

_CHOICE = re.compile(r"argument (?P<what>.+): invalid choice: (?P<given>'.*') \(choose from (?P<known>.*)\)")
_COMMAND = "COMMAND"
_FOREIGN = re.compile(r"unrecognized arguments: (?P<given>\S+).*")


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations that reports an error in one sentence with the closest match: exit code 78."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self._sentence(message)} Try '{self.prog} --help'.")

    def _sentence(self, message: str) -> str:
        if match := _CHOICE.fullmatch(message):
            known = re.findall(r"[\w-]+", match["known"])
            if self.formatter_class is GroupedHelp:
                known = [*chain.from_iterable(grouped(known).values())]
            given = match["given"].strip("'")
            close = (suggestion if match["what"] == _COMMAND else did_you_mean)(given, known)
            return f"{given!r} is not a known {match['what']}.{close} Known: {', '.join(known)}."
        if match := _FOREIGN.fullmatch(message):
            options = [option for action in self._actions for option in action.option_strings]
            return f"{match['given']!r} is not known here.{did_you_mean(match['given'], options)}"
        return f"{message}."


def build_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="phalanx",
        description="Train PyTorch models; look into their runs and checkpoints.",
        epilog="example:\n  phalanx why    why the newest run below here ended, and what resumes it",
        formatter_class=GroupedHelp,
    )
    parser.add_argument("--version", action="version", version=f"phalanx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar=_COMMAND, required=True, title="commands")
    for each in (begin_commands, run_commands, launch_commands, look_commands, checkpoint_commands, move_commands):
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
