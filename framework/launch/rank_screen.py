"""The screen that ranks print on: ``Screen`` shows one stream of one rank; rank 0 writes to a ``terminal``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import termios

_WAIT_SECONDS = 0.2


class Screen:
    """A descriptor on which one stream of one rank is shown, and that stream's incomplete line.

    Output is shown line by line, since ranks write a line in parts and would be mixed: except on a terminal, which only
    rank 0 has.
    """

    def __init__(self, descriptor: int, label: bytes, is_terminal: bool) -> None:
        self.descriptor = descriptor
        self.is_terminal = is_terminal
        self._label = label
        self._line = b""
        self._is_open = True

    def show(self, data: bytes) -> None:
        """Show output: immediately on a terminal, else its complete lines."""
        if not self.is_terminal:
            *lines, self._line = (self._line + data).split(b"\n")
            data = b"".join(self._label + line + b"\n" for line in lines)
        self._write(data)

    def pause(self) -> None:
        """Show an incomplete line of rank 0, such as a prompt, after a time without output."""
        if not self._label:
            line, self._line = self._line, b""
            self._write(line)

    def end(self) -> None:
        """Show an incomplete line."""
        self.pause()
        if self._line:
            self.show(b"\n")

    def _write(self, data: bytes) -> None:
        if self._is_open:
            self._is_open = _write(self.descriptor, data)


def _write(descriptor: int, data: bytes) -> bool:
    """Write all data; return False if the reading end is closed."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [], _WAIT_SECONDS)
        except OSError:
            return False
    return True


def terminal() -> tuple[int, int]:
    """Return the ends of a pseudo-terminal with the size of this terminal that passes output on unchanged."""
    reading, writing = os.openpty()
    with contextlib.suppress(OSError, termios.error):
        modes = termios.tcgetattr(writing)
        # Otherwise it would write "\r\n" for each "\n", and the real terminal would convert it again.
        modes[1] &= ~termios.OPOST
        termios.tcsetattr(writing, termios.TCSANOW, modes)
        follow_size(1 if os.isatty(1) else 2, writing)
    return reading, writing


def follow_size(shown: int, inside: int) -> None:
    """Give a pseudo-terminal, by either of its ends, the size of the terminal that shows its output."""
    with contextlib.suppress(OSError, termios.error):
        size = fcntl.ioctl(shown, termios.TIOCGWINSZ, b"\0" * 8)
        if size != fcntl.ioctl(inside, termios.TIOCGWINSZ, b"\0" * 8):
            fcntl.ioctl(inside, termios.TIOCSWINSZ, size)
