"""``AdvancedProfiler``: the Python functions in which a fit spends its time, by cProfile."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from .profiler import Profiler

if TYPE_CHECKING:
    import cProfile

_ROWS = 40


class AdvancedProfiler(Profiler):
    """Measure every Python function of the main thread with cProfile, and print those that took the most time.

    It makes Python code slower, short functions the most.

    Args:
        dirpath: The directory of the files; by default ``profile`` in the directory of the run.
        filename: The first part of the names of the files; by default ``fit``.
        line_count_restriction: The rows of the table: a number, or a fraction of all functions.
        dump_stats: Also write a file for ``pstats`` and for programs that draw such files.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = _ROWS,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._profile: cProfile.Profile | None = None
        self._is_running = False

    def begin(self, directory: Path | None, rank: int) -> None:
        # Used by few fits.
        import cProfile

        super().begin(directory, rank)
        self._profile = cProfile.Profile()
        self._profile.enable()
        self._is_running = True

    def end(self) -> None:
        if self._profile is not None and self._is_running:
            self._profile.disable()
            self._is_running = False
            if self.dump_stats and self._directory is not None:
                self._profile.dump_stats(str(self.path(".prof")))
        super().end()

    def summary(self) -> str:
        """Return the functions with the largest cumulative time."""
        if self._profile is None or self._is_running:
            return ""
        import pstats

        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("cumulative").print_stats(self.line_count_restriction)
        return text.getvalue().strip()
