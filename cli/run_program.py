"""``phalanx fit``, ``validate``, ``test`` and ``predict``: stages of a configuration, and scripts with overrides."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

from ..framework.configuration.script_overrides import parse_overrides
from ..framework.configuration.trainer_cli import TrainerCLI
from ..framework.core.errors import ConfigurationError, PhalanxError
from ..framework.launch import fork_server_main
from ..framework.launch.fork_server_main import SEARCHES_OWN_FOLDER, run_as_main
from ..framework.system.environment import error_dir, override_script
from ..framework.system.failure_records import exit_code_of, shows_lines
from .user_program import require_file, search_working_directory

_OWN_FILES = (__file__, fork_server_main.__file__)


def run_stage(given: argparse.Namespace) -> int:
    """Run a stage of a configuration, or a script; return the exit code."""
    arguments: list[str] = given.arguments
    if arguments[:1] in (["-h"], ["--help"]):
        given.parser.print_help()
        return 0
    paths = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    rest = arguments[len(paths) :]
    for path in paths:
        require_file(path, "script" if path.endswith(".py") else "file")
    if not any(path.endswith(".py") for path in paths):
        if not arguments:
            given.parser.error("give a configuration file")
        search_working_directory()
        # As for a script, the classes of a configuration may be beside it.
        sys.path.extend(folder for path in paths if (folder := str(Path(path).resolve().parent)) not in sys.path)
        return _run_configuration(given.stage, [*(f"--config={path}" for path in paths), *rest])
    if given.stage != "fit" or len(paths) > 1:
        raise ConfigurationError(
            f"{' '.join(paths)!r}: a script runs by 'phalanx fit SCRIPT', with its own arguments after '--'."
        )
    return _run_script(paths[0], rest)


def _run_configuration(stage: str, arguments: Sequence[str]) -> int:
    """Create the objects of a configuration, and run a stage with them."""

    class Command(TrainerCLI):
        """A program that has only this stage."""

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """Return the stage."""
            return {stage: TrainerCLI.subcommands()[stage]}

    options = {"prog": "phalanx", "default_env": True}
    return _run_reporting(lambda: Command(args=[stage, *arguments], parser_kwargs=options))


def _run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as the interpreter would, with overrides of its Trainer's arguments."""
    own = list(takewhile(lambda argument: argument != "--", arguments))
    target = os.path.abspath(script)
    if overrides := parse_overrides(own):
        override_script(target, overrides)
    if SEARCHES_OWN_FOLDER:
        # The folder of this command, which that of the script replaces.
        del sys.path[0]
    return _run_reporting(partial(run_as_main, target, False, arguments[len(own) + 1 :]))


def _run_reporting(program: Callable[[], object]) -> int:
    """Run a program; show its error as the interpreter would, without frames of this file, and return its exit code."""
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, PhalanxError) and error_dir() is None and not shows_lines(error):
            # Its sentence is all that there is to show. A rank records it instead.
            raise
        trace = error.__traceback__
        while trace is not None and _is_hidden(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return exit_code_of(error)
    return 0


def _is_hidden(file: str) -> bool:
    """Whether a file's frames above the program's are left out: those of the command, and of Python's own loader."""
    return file in _OWN_FILES or file.startswith("<frozen importlib")
