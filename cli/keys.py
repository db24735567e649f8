"""``Keys``: single keys of a terminal, read while a view is shown on its second screen."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any

_SECOND_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Keys:
    """A context in which the terminal passes each key on at once. Its modes are restored on exit."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        self._before = termios.tcgetattr(self._descriptor)
        # Ctrl-C still raises KeyboardInterrupt.
        tty.setcbreak(self._descriptor)
        self.draw(_SECOND_SCREEN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def draw(self, text: str) -> None:
        """Write text to the terminal at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def wait(self, seconds: float) -> str:
        """Wait for a key; return it, or an empty text if none was pressed. The end of the input counts as ``q``."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        return os.read(self._descriptor, 1).decode("ascii", "replace").lower() or "q"

    def close(self) -> None:
        """Show the first screen again, with the terminal's own modes."""
        if self._before is not None:
            before, self._before = self._before, None
            with contextlib.suppress(OSError, ValueError):
                self.draw(_FIRST_SCREEN)
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)
