"""The help of the command and of each of its commands, and the answers to names that it does not know."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from command_terminal import Terminal, command, shown_lines
from ranks import run_command

from phalanx.cli.command_parser import GROUPS, OTHER_NAMES, imported, suggestion
from phalanx.cli.main import build_parser
from phalanx.errors import ConfigurationError


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from parsers(each)


COMMANDS = {parser.prog.removeprefix("phalanx "): parser for parser in parsers(build_parser())}
COMPLETE = [name for name in COMMANDS if name != "checkpoint"]


def test_commands_are_listed_by_group_on_one_screen(tmp_path: Path) -> None:
    lines = shown_lines(Terminal(["--help"], tmp_path).end())
    assert (len(lines) <= 40, max(map(len, lines)) <= 80) == (True, True)
    listed = lines[lines.index("commands:") + 1 : lines.index("example:") - 1]
    known = {title: [name for name in names.split() if name in COMMANDS] for title, names in GROUPS.items()}
    assert [line.split()[0] for line in listed if line[2] != " "] == [title for title, names in known.items() if names]
    assert [line[9:].split()[0] for line in listed if line[9] != " "] == [*chain.from_iterable(known.values())]
    assert lines == command("--help", cwd=tmp_path, env={"COLUMNS": "80"}).stdout.splitlines()


_LOADED = r"""
import contextlib, io, sys
from phalanx.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
print(*sys.modules, sep="\n")
"""


def test_the_help_imports_nothing_that_reads_runs_or_checkpoints(tmp_path: Path) -> None:
    loaded = set(run_command([sys.executable, "-c", _LOADED], tmp_path).stdout.splitlines())
    assert "phalanx.framework.core.errors" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "rich", "torchmetrics", "libcst"})
    assert loaded.isdisjoint({"phalanx.checkpoint", "phalanx.cli.checkpoint", "phalanx.framework.report"})


def test_known_commands_are_in_the_order_of_the_help() -> None:
    with pytest.raises(ConfigurationError) as refused:
        build_parser().parse_args(["nothing"])
    listed = str(refused.value).partition("Known: ")[2].partition(".")[0].split(", ")
    known = [name for names in GROUPS.values() for name in names.split()]
    assert listed == [name for name in known if name in COMMANDS]


@pytest.mark.parametrize("name", COMPLETE)
def test_each_command_has_a_function_and_a_help_with_an_example_that_fits_a_screen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(imported(COMMANDS[name].get_default("run")))
    monkeypatch.setenv("COLUMNS", "80")
    lines = COMMANDS[name].format_help().splitlines()
    assert (len(lines) <= 24, max(map(len, lines)) <= 80) == (True, True)
    example = lines[lines.index("example:") + 1 :]
    assert all(name in line for line in example)
    assert example
    # No abbreviation is accepted.
    assert not any(parser.allow_abbrev for parser in (build_parser(), COMMANDS[name]))


def test_an_abbreviation_and_a_missing_command_are_answered_in_one_line(tmp_path: Path) -> None:
    for arguments, expected in (
        (["doctor", "--bui"], "'--bui' is not known here. Did you mean '--build'? Try 'phalanx doctor --help'."),
        (["checkpoint", "list", ".", "--verif"], "Did you mean '--verify'?"),
        (["doctr"], "'doctr' is not a known COMMAND. Did you mean 'doctor'?"),
        (["new", "classifer", "x"], "'classifer' is not a known KIND. Did you mean 'classifier'?"),
        ([], "the following arguments are required: COMMAND."),
    ):
        done = command(*arguments, cwd=tmp_path)
        assert (done.returncode, len(done.stdout.splitlines())) == (78, 1), done.stdout
        assert expected in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("given", "meant"), [("env", "doctor"), ("merge-weights", "checkpoint consolidate")])
def test_names_of_other_tools_are_answered_with_those_of_phalanx(given: str, meant: str, tmp_path: Path) -> None:
    done = command(given, cwd=tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (78, 1)
    assert f"Here it is 'phalanx {meant}'." in done.stdout


def test_no_name_of_another_tool_hides_a_command_or_leads_nowhere() -> None:
    assert not OTHER_NAMES.keys() & COMMANDS.keys()
    to_come = {"fit", "validate", "test", "predict", "launch", "migrate", "export"}
    assert set(OTHER_NAMES.values()) <= COMMANDS.keys() | to_come
    for given in ("train", "Train"):
        assert suggestion(given, ["fit", "runs"]) == " Here it is 'phalanx fit'."
    assert suggestion("train", ["runs"]) == ""
