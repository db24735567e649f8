"""Scripts in a terminal of some width, and what is on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Mapping
from pathlib import Path

from ranks import end_session, read_terminal, warm_python

_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|\r|\n|[^\x1b\r\n]+")
# They decide what is drawn, and may be set where the tests run.
_DECIDING = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "PHALANX_PROGRESS", "PHALANX_QUIET"}


def run_in_screen(source: str, columns: int, directory: Path, *arguments: str, env: Mapping[str, str] = {}) -> str:
    """Run a script in a terminal that is so wide, in a process that has torch imported; return what it wrote.

    Raises:
        AssertionError: its exit code is not 0.
    """
    script = directory / "script.py"
    script.write_text(source)
    mine, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in _DECIDING}
    variables = {**known, "TERM": "xterm-256color", **env}
    process = warm_python().start(script, arguments, directory, variables, inside)
    os.close(inside)
    try:
        written = read_terminal(mine)
    finally:
        end_session(process.pid)
    assert process.wait() == 0, written
    return written


def drawn_lines(written: str) -> list[str]:
    """Return each line that was ever drawn, without control sequences."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written))


def screen_of(written: str) -> list[str]:
    """Return the lines that are on the screen in the end, for the sequences that erase lines and move the cursor up."""
    rows, y, x = [""], 0, 0
    for match in _CONTROL.finditer(written):
        text, number, kind = match[0], match[1], match[2]
        if text == "\r":
            x = 0
        elif text == "\n":
            y, x = y + 1, 0
            rows += [""] * (y + 1 - len(rows))
        elif kind == "A":
            y = max(0, y - int(number or 1))
        elif kind == "K":
            rows[y] = "" if number == "2" else rows[y][:x]
        elif kind is None:
            rows[y] = rows[y][:x].ljust(x) + text + rows[y][x + len(text) :]
            x += len(text)
    return [row.rstrip() for row in rows]
