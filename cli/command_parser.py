"""``add_command``: commands whose help has one form. ``GroupedHelp`` lists them by group."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

# In the order of the help. A command that is not here is listed at the end.
GROUPS = {
    "begin": "new demo doctor selftest completion",
    "run": "fit validate test predict launch plan",
    "look": "runs top report why data compare",
    "keep": "checkpoint rewind",
    "move": "migrate export",
}
_OTHERS = "more"
# The help of a command fits a terminal of 80 columns.
_WIDTH, _GROUP_WIDTH, _NAME_WIDTH = 80, 7, 12


def grouped(commands: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of commands by the title of their section, in the order of the help."""
    given = list(commands)
    groups = {title: [name for name in names.split() if name in given] for title, names in GROUPS.items()}
    listed = {name for names in groups.values() for name in names}
    return {**groups, _OTHERS: [name for name in given if name not in listed]}


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
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
    details: str = "",
    has_json: bool = True,
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example.

    Args:
        commands: the subparsers of a parser.
        run: called with the parsed arguments; returns the exit code.
        summary: one sentence without a full stop, for the list of commands and the command's own help.
        details: further lines of the command's own help.
        has_json: whether the command takes ``--json``.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}." + (f"\n{details}" if details else ""),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
