"""The parser of the command ``phalanx``: help and errors of one form, and commands that are imported when they run."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, NoReturn

from ..framework.core.errors import ConfigurationError, did_you_mean
from ..framework.storage.cached_url import is_url
from ..framework.storage.mirror import refreshed

# In the order of the help. A command that is not here is listed at the end.
GROUPS = {
    "begin": "new demo doctor selftest completion",
    "run": "fit validate test predict eval launch sweep try plan",
    "look": "runs top metrics report why data compare schema",
    "keep": "checkpoint rewind clean",
    "move": "migrate export",
}
_OTHERS = "more"
COMMAND = "COMMAND"
"""The placeholder of the name of a command, by which the errors of argparse refer to it."""
# The help of a command fits a terminal of 80 columns.
_WIDTH, _GROUP_WIDTH, _NAME_WIDTH = 80, 7, 12
# Arguments that refer to runs and checkpoints, also by URLs.
_LOCATIONS = ("directory", "given_run", "first", "second", "path", "paths", "other", "source")
# Messages of argparse.
_INVALID_CHOICE = re.compile(r"argument (?P<what>.+): invalid choice: (?P<given>'.*') \(choose from (?P<known>.*)\)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<given>\S+).*")

# What the commands of phalanx are called in Accelerate, Lightning, torch, DeepSpeed, Hugging Face's libraries and
# TensorBoard, and what users try first.
_CALLED_ELSEWHERE = {
    "new": "config init create",
    "demo": "quickstart example",
    "doctor": "env collect-env ds_report check info",
    "selftest": "self-test",
    "fit": "train run finetune",
    "eval": "evaluate lm_eval lm-eval",
    "predict": "infer generate",
    "launch": "torchrun start submit",
    "sweep": "tune hpo search optuna",
    "plan": "estimate-memory estimate memory dry-run",
    "runs": "ls list experiments",
    "top": "watch status monitor",
    "metrics": "prometheus exporter serve",
    "report": "tensorboard show logs",
    "why": "explain",
    "checkpoint list": "checkpoints",
    "checkpoint inspect": "inspect",
    "checkpoint verify": "verify",
    "checkpoint diff": "diff",
    "checkpoint consolidate": "merge-weights zero_to_fp32 consolidate",
    "checkpoint convert": "convert",
    "migrate": "to-fsdp2 upgrade fix",
}
OTHER_NAMES = {other: command for command, others in _CALLED_ELSEWHERE.items() for other in others.split()}


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations that reports an error in one sentence with the closest match: exit code 78."""

    takes_program = False
    """Whether the command takes the arguments of a program after ``--``; they are in ``arguments`` of the result."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; those of a program are kept apart, which may have the names of options."""
        if not self.takes_program:
            return super().parse_known_args(args, namespace)
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        found, foreign = super().parse_known_args(given[:end], namespace)
        found.arguments = given[end + 1 :]
        return found, foreign

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self._sentence(message)} Try '{self.prog} --help'.")

    def _sentence(self, message: str) -> str:
        if match := _INVALID_CHOICE.fullmatch(message):
            given, known = match["given"].strip("'"), re.findall(r"[\w-]+", match["known"])
            if match["what"] == COMMAND:
                known = [*chain.from_iterable(grouped(known).values())]
                close = suggestion(given, known)
            else:
                close = did_you_mean(given, known)
            return f"{given!r} is not a known {match['what']}.{close} Known: {', '.join(known)}."
        if match := _UNRECOGNIZED.fullmatch(message):
            options = [option for action in self._actions for option in action.option_strings]
            return f"{match['given']!r} is not known here.{did_you_mean(match['given'], options)}"
        return f"{message}."


def grouped(commands: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of commands by the title of their section, in the order of the help."""
    given = list(commands)
    groups = {title: [name for name in names.split() if name in given] for title, names in GROUPS.items()}
    listed = {name for names in groups.values() for name in names}
    return {**groups, _OTHERS: [name for name in given if name not in listed]}


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return a sentence with the command that an unknown one stands for, or the closest known one, or nothing."""
    names = list(known)
    meant = OTHER_NAMES.get(given.lower(), "")
    if meant.partition(" ")[0] in names:
        return f" Here it is 'phalanx {meant}'."
    return did_you_mean(given, names)


class GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """Formats help with the commands of ``GROUPS`` in one line each, below the title of their section."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        summaries = {each.dest: each.help or "" for each in action._choices_actions}
        lines = []
        for title, names in grouped(summaries).items():
            for number, name in enumerate(names):
                head = f"  {'' if number else title:<{_GROUP_WIDTH}}{name:<{_NAME_WIDTH}}"
                rest = " " * len(head)
                lines += textwrap.wrap(summaries[name], _WIDTH, initial_indent=head, subsequent_indent=rest)
        return "".join(f"{line}\n" for line in lines)


def add_command(
    commands: Any,
    name: str,
    run: str,
    summary: str,
    example: str,
    details: str = "",
    has_json: bool = True,
    needs: str = "",
    takes_program: bool = False,
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example.

    Args:
        commands: the subparsers of a parser.
        run: ``"module:function"`` in this package, see ``imported``. The function is called with the parsed arguments
            and returns the exit code.
        summary: one sentence without a full stop, for the list of commands and the command's own help.
        details: further lines of the command's own help.
        has_json: whether the command takes ``--json``.
        needs: the requirement for an optional package without which the command cannot run, such as ``"shtab>=1.7"``.
        takes_program: whether what follows ``--`` are the arguments of a program, in ``arguments`` of the result.
    """
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}." + (f"\n{details}" if details else ""),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.takes_program = takes_program
    parser.set_defaults(run=run, parser=parser, needs=needs)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run_command(given: argparse.Namespace) -> int:
    """Import the command that was given, and run it; return its exit code.

    Raises:
        ConfigurationError: it needs a package that is not installed.
    """
    package = re.split(r"[<>=]", given.needs)[0].replace("-", "_")
    if package and find_spec(package) is None:
        raise ConfigurationError(
            f"{given.parser.prog} needs {package}, which is not installed: pip install '{given.needs}'."
        )
    for name in _LOCATIONS:
        if hasattr(given, name):
            setattr(given, name, _local(getattr(given, name)))
    code: int = imported(given.run)(given)
    return code


def _local(value: Any) -> Any:
    """Return the local directories of arguments that are URLs."""
    if isinstance(value, list):
        return [_local(each) for each in value]
    return str(refreshed(value)) if isinstance(value, str) and is_url(value) else value


def imported(function: str) -> Callable[..., Any]:
    """Import ``"module:function"`` of this package.

    A command is imported when it runs: the arguments of all commands are built for each of them, and must not cost the
    import of torch, which few of them need.
    """
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(f".{module}", __package__), name)
    return found
