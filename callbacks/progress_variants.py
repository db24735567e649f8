"""``RichProgressBar`` and ``TQDMProgressBar``: ``ProgressBar`` with the arguments of Lightning's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..framework.core.absent_names import lacks, must_be_none
from ..framework.core.errors import ConfigurationError, is_count
from .absent import RICH_PROGRESS_BAR, TQDM_PROGRESS_BAR
from .progress import ProgressBar
from .progress_live import Live
from .progress_screens import Screen


@lacks(RICH_PROGRESS_BAR)
class RichProgressBar(ProgressBar):
    """A ``ProgressBar`` that draws the live bar even if the output is not a terminal.

    Args:
        refresh_seconds: Time between two updates of the live bar, in seconds.
        line_seconds: Minimum time between two lines of text within an epoch, in seconds.
        refresh_rate: 0: display nothing. Other numbers have no effect, as updates follow the clock.
        leave: Accepted for compatibility: a line with the metrics of each epoch always remains.
        theme: Must be None; Lightning has the argument.
        console_kwargs: Further arguments of rich's ``Console``, such as ``theme``.

    Raises:
        ConfigurationError: A time is not positive, the rate is negative, or a theme is given.
    """

    def __init__(
        self,
        refresh_seconds: float = 0.1,
        line_seconds: float = 10.0,
        *,
        refresh_rate: int = 1,
        leave: bool = True,
        theme: None = None,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        must_be_none("RichProgressBar(theme=...)", theme, "the bar has rich's colors; console_kwargs can set others")
        super().__init__(refresh_seconds, line_seconds)
        self.refresh_rate = _checked(self, refresh_rate)
        self._shown = refresh_rate > 0
        self.theme = theme
        self._console_arguments = dict(console_kwargs or {})

    def _make_screen(self) -> Screen:
        return Live(self._refresh_seconds, force=True, console_arguments=self._console_arguments)


@lacks(TQDM_PROGRESS_BAR)
class TQDMProgressBar(ProgressBar):
    """A ``ProgressBar`` with the arguments of Lightning's class of this name.

    Args:
        refresh_rate: 0: display nothing. Other numbers have no effect, as updates follow the clock.
        process_position: Accepted for compatibility: only rank 0 displays progress.
        leave: Accepted for compatibility: a line with the metrics of each epoch always remains.

    Raises:
        ConfigurationError: The rate is negative.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        self.refresh_rate, self.process_position = _checked(self, refresh_rate), process_position
        self._shown = refresh_rate > 0


def _checked(bar: ProgressBar, refresh_rate: int) -> int:
    if not is_count(refresh_rate, 0):
        raise ConfigurationError(
            f"{type(bar).__name__}(refresh_rate={refresh_rate!r}): give a whole number, 0 for no display."
        )
    return refresh_rate
