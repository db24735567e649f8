"""Helpers that run the command in a terminal of 80 columns, with a pipe, and with ``--json``."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from ranks import end_session, read_terminal, run_command, run_script

_WARM = """
import os, sys
from phalanx.cli.main import main

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
"""


def command(*arguments: Any, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; ``stdout`` holds both its streams."""
    return run_command([sys.executable, "-m", "phalanx", *map(str, arguments)], cwd, env)


def warm_command(*arguments: Any, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own that has torch imported; it starts no ranks as scripts."""
    return run_script(_WARM, str(cwd), *map(str, arguments), env=env)


def answer(*arguments: Any, cwd: Path) -> Any:
    """Return what a command prints with ``--json``."""
    done = warm_command(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
        self.mine, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(inside)
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", *arguments], stdin=inside, stdout=inside, stderr=inside, cwd=cwd,
            env={**known, "TERM": "xterm", **(env or {})}, start_new_session=True,
        )  # fmt: skip
        self.inside = inside

    def read_until(self, text: str) -> str:
        """Return what is shown up to a text."""
        shown, until = "", time.monotonic() + 60.0
        while text not in shown:
            assert time.monotonic() < until, shown
            shown += self._read(0.5)
        return shown

    def end(self, exit_code: int = 0, seconds: float = 60.0) -> str:
        """Return what is shown, once the command has ended."""
        shown, until = "", time.monotonic() + seconds
        try:
            # A terminal holds a few pages; a command that fills it would wait.
            while self.process.poll() is None:
                assert time.monotonic() < until, shown
                shown += self._read(0.05)
        finally:
            end_session(self.process.pid)
            self.process.wait()
        assert termios.tcgetattr(self.inside) == self.modes
        os.close(self.inside)
        shown += read_terminal(self.mine)
        assert self.process.returncode == exit_code, shown
        return shown

    def _read(self, seconds: float) -> str:
        ready = select.select([self.mine], [], [], seconds)[0]
        return os.read(self.mine, 1 << 16).decode(errors="replace") if ready else ""


def shown_lines(text: str) -> list[str]:
    """Return the lines that a terminal shows, without colours. None of these is shown as text."""
    assert "\\x1b" not in text
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines()
