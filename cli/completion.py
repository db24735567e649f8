"""``phalanx completion``: the script by which a shell completes commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from .main import build_parser

# The placeholders of arguments that are paths, or may be.
_FOLDERS = ("DIR",)
_FILES = ("FILE", "SCRIPT", "TARGET", "RUN", "FROM", "OUT", "A", "B", "path", "paths", "out", "other", "arguments")


def print_completion(given: argparse.Namespace) -> int:
    """Print the script of a shell; return the exit code."""
    parser = build_parser()
    for action in _arguments(parser):
        placeholder = action.metavar or action.dest
        if placeholder in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif placeholder in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
            if action.help == argparse.SUPPRESS:
                # Left out of the help, as it is explained there in other words, and by shtab.
                action.help = ""
    print(shtab.complete(parser, shell=given.shell))
    return 0


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        else:
            yield action
