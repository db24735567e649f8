"""``CalledCommand``: the exit code and the output of a command that is called in the process of a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

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
