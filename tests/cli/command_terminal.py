"""Helpers that call the command in this process, or run it in a process of its own, also in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import phalanx_program
from ranks import end_session, read_terminal, run_script, wait_until, warm_python

from phalanx.cli.main import main

PHALANX = Path(phalanx_program.__file__)
"""The script of the command."""


def command(*arguments: Any, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Call the command in this process; ``stdout`` holds both its streams, which are no terminal."""
    before, written = Path.cwd(), io.BytesIO()
    shown = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    os.chdir(cwd)
    try:
        with (
            mock.patch.dict(os.environ, env or {}),
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(shown),
        ):
            code = main([*map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(arguments, code, written.getvalue().decode())


def warm_command(*arguments: Any, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own that has torch imported."""
    return run_script(PHALANX, *map(str, arguments), env=env, cwd=cwd)


def answer(*arguments: Any, cwd: Path) -> Any:
    """Return what a command prints with ``--json``."""
    done = command(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


class Terminal:
    """A command in a terminal of 80 columns.

    Args:
        arguments: those of the command.
        cwd: its folder.
        env: what is added to the environment.
        is_new: whether it runs in a new interpreter, and reads from the terminal; else it has torch imported.
    """

    def __init__(
        self, arguments: list[str], cwd: Path, env: dict[str, str] | None = None, is_new: bool = False
    ) -> None:
        self.mine, self.inside = pty.openpty()
        fcntl.ioctl(self.inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(self.inside)
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        variables = {**known, "TERM": "xterm", **(env or {})}
        self.process: subprocess.Popen[Any]
        if is_new:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx", *arguments], stdin=self.inside, stdout=self.inside,
                stderr=self.inside, cwd=cwd, env=variables, start_new_session=True,
            )  # fmt: skip
        else:
            self.process = warm_python().start(PHALANX, arguments, cwd, variables, self.inside)

    def read_until(self, text: str) -> str:
        """Return what is shown up to a text."""
        return self._read_while_waiting(lambda shown: text in shown, 60.0)

    def end(self, exit_code: int = 0, seconds: float = 60.0) -> str:
        """Return what is shown, once the command has ended."""
        try:
            # A terminal holds a few pages; a command that fills it would wait.
            shown = self._read_while_waiting(lambda shown: self.process.poll() is not None, seconds)
        finally:
            end_session(self.process.pid)
            self.process.wait()
        assert termios.tcgetattr(self.inside) == self.modes
        os.close(self.inside)
        shown += read_terminal(self.mine)
        assert self.process.returncode == exit_code, shown
        return shown

    def _read_while_waiting(self, is_over: Callable[[str], bool], seconds: float) -> str:
        """Return what is shown until a condition on it holds. A busy machine extends the limit on time."""
        shown = ""

        def has_come() -> bool:
            nonlocal shown
            shown += self._read(0.05)
            return is_over(shown)

        try:
            wait_until(has_come, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; the terminal shows:\n{shown}") from None
        return shown

    def _read(self, seconds: float) -> str:
        ready = select.select([self.mine], [], [], seconds)[0]
        return os.read(self.mine, 1 << 16).decode(errors="replace") if ready else ""


def shown_lines(text: str) -> list[str]:
    """Return the lines that a terminal shows, without colours. None of these is shown as text."""
    assert "\\x1b" not in text
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines()
