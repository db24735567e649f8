"""``Notebook``: the screen of ``ProgressBar`` for notebooks, a bar and a table of epochs in HTML."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from html import escape
from typing import Any

from ..framework.system.console import print_line
from .epoch_table import Best, EpochTable
from .progress_screens import UNKNOWN, Frame

_SECONDS = 0.25
_MOST_ROWS = 50
"""The last rows, which each update sends. All rows are sent once, at the end of the stage."""


class Notebook:
    """One output of a cell, which is replaced: the bar of the stage in progress below the table of its epochs.

    The bar is gone once the stage has ended, and the table remains. Front ends without HTML show text.
    """

    def __init__(self) -> None:
        from IPython.display import display

        self.seconds = _SECONDS
        self._display: Any = display
        self._identity = uuid.uuid4().hex
        self._is_shown = False
        self._table = EpochTable(Best())
        self._bar = self._line = ""

    def show(self, text: str) -> None:
        print_line(text)

    def draw(self, frame: Frame, details: Sequence[str]) -> None:
        numbers = ", ".join([frame.position(), *frame.pace(), *details])
        extent = "" if frame.total == UNKNOWN else f' max="{max(1.0, frame.total):g}" value="{frame.done}"'
        self._line = f"{frame.label}: {numbers}"
        self._bar = f"<div>{escape(frame.label)} <progress{extent}></progress> {escape(numbers)}</div>"
        self._update()

    def pause(self, frame: Frame) -> float:
        return self.seconds

    def end(self, line: str) -> None:
        self._bar = ""
        if line:
            self.show(line)

    def end_epoch(self, line: str, table: EpochTable) -> None:
        self._table, self._line, self._bar = table, line, ""
        self._update()

    def close(self) -> None:
        if self._bar or self._is_shown:
            self._bar = ""
            self._update(most=None)
        self._is_shown = False
        self._identity = uuid.uuid4().hex

    def _update(self, most: int | None = _MOST_ROWS) -> None:
        data = {"text/html": self._table.html(most) + self._bar, "text/plain": self._line}
        self._display(data, raw=True, display_id=self._identity, update=self._is_shown)
        self._is_shown = True
