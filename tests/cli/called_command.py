"""``CalledCommand``: the exit code and the output of a command that is called in the process of a test.

``start_programs_warm`` lets such a command start the user's programs in processes that have torch imported.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_terminal import PHALANX
from ranks import warm_python

from phalanx.cli import programs
from phalanx.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """The exit code of a command, and what it wrote to both streams."""

    code: int
    out: str
    err: str


class CalledCommand:
    """Calls ``phalanx NAME ARGUMENTS...``."""

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._name, self._capsys = name, capsys

    def __call__(self, *arguments: Any) -> Outcome:
        self._capsys.readouterr()
        code = main([self._name, *map(str, arguments)])
        shown = self._capsys.readouterr()
        return Outcome(code, shown.out, shown.err)


def start_programs_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``phalanx sweep`` and ``phalanx try`` start programs in processes that have torch imported."""

    def start(command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "phalanx"]
        return warm_python().start(PHALANX, command[3:], Path.cwd(), env, stdout.fileno())

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(programs, "subprocess", SimpleNamespace(**names, Popen=start))
