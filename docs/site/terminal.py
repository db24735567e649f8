"""Run a command in a terminal of a given size, and return its last screen.

``Screen`` knows the control sequences that rich uses for a live display: returns, movement up, erased lines and colors.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

_TOKEN = re.compile(
    r"\x1b\[(?P<numbers>[0-9;?]*)(?P<letter>[A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\r|\n|[^\x00-\x1f]"
)


class Screen:
    """The lines of a terminal, each a list of letters with the color sequences that apply to them."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        self.row = self.column = 0
        self.style = ""

    def write(self, text: str) -> None:
        """Interpret the output of a program."""
        for token in _TOKEN.finditer(text):
            if token["letter"]:
                self._control(token["letter"], token["numbers"], token.group())
            elif token.group() == "\r":
                self.column = 0
            elif token.group() == "\n":
                self._move_to(self.row + 1)
            elif not token.group().startswith("\x1b"):
                self._put(token.group())

    def ansi(self) -> str:
        """Return the lines, with a color sequence before each piece of one color."""
        return "\n".join(
            "".join(f"{style}{''.join(letter for letter, _ in cells)}\x1b[0m" for style, cells in groupby(line, _style))
            for line in self.lines
        ).rstrip()

    def _control(self, letter: str, numbers: str, sequence: str) -> None:
        if letter == "m":
            self.style = "" if numbers in ("", "0") else self.style + sequence
        elif letter == "A":
            self._move_to(self.row - int(numbers or 1))
        elif letter == "K":
            self.lines[self.row] = [] if numbers == "2" else self.lines[self.row][: self.column]

    def _move_to(self, row: int) -> None:
        self.row = max(0, row)
        self.lines += [[] for _ in range(self.row + 1 - len(self.lines))]

    def _put(self, letter: str) -> None:
        line = self.lines[self.row]
        line += [(" ", "")] * (self.column + 1 - len(line))
        line[self.column] = (letter, self.style)
        self.column += 1


def _style(cell: tuple[str, str]) -> str:
    return cell[1]


def last_screen(command: Sequence[str], directory: Path, variables: Mapping[str, str], columns: int) -> Screen:
    """Run a command to its end in a terminal with a number of columns.

    Raises:
        RuntimeError: the command failed; the message has its output.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        command, cwd=directory, env={**os.environ, **variables}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = b""
    while part := _read(ours):
        output += part
    os.close(ours)
    screen = Screen()
    screen.write(output.decode(errors="replace"))
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{screen.ansi()}")
    return screen


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        # Linux reports the end of the last process of a terminal so.
        return b""
