"""``Profiler``: the base class of profilers, which measure sections of a fit by name on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..core.arguments import NamesArguments
from ..core.errors import ConfigurationError

T = TypeVar("T")

SECTIONS = (
    "data", "forward", "backward", "communication", "optimizer", "callbacks", "logging", "validation", "checkpoints",
)  # fmt: skip
"""The sections of a fit that a Trainer measures. Sections of the user may have any other name."""


class Profiler(NamesArguments):
    """Measures sections by name. Subclasses override ``start``, ``stop`` and ``summary``.

    A Trainer calls ``begin`` on every rank before a fit, ``start`` and ``stop`` around its sections, ``step`` after
    each optimizer step, and ``end`` after the fit, also after an error.

    Args:
        dirpath: The directory of the files; by default ``profile`` in the directory of the run.
        filename: The first part of the names of the files; by default ``fit``.
    """

    measures = True
    """Whether a Trainer measures the sections of a fit."""

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        for name, value in (("dirpath", dirpath), ("filename", filename)):
            if value is not None and not isinstance(value, (str, Path)):
                raise ConfigurationError(f"{type(self).__name__}({name}={value!r}): give a path or None.")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.filename = "fit" if filename is None else str(filename)
        self._directory: Path | None = None
        self._rank = 0

    # ---- sections ---------------------------------------------------------------------------------------------------

    @contextmanager
    def profile(self, action_name: str) -> Generator[str, None, None]:
        """Measure a block as a section of this name."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def profile_iterable(self, iterable: Iterable[T], action_name: str) -> Iterator[T]:
        """Yield the items of ``iterable``; measure how long each takes to be fetched."""
        iterator = iter(iterable)
        while True:
            self.start(action_name)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.stop(action_name)
            yield item

    def around(self, action_name: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return ``function``, measured as a section of this name."""

        def measured(*args: Any, **kwargs: Any) -> T:
            self.start(action_name)
            try:
                return function(*args, **kwargs)
            finally:
                self.stop(action_name)

        return measured

    def start(self, action_name: str) -> None:
        """Begin a section. Sections may be nested."""

    def stop(self, action_name: str) -> None:
        """End the section that was begun last."""

    def step(self) -> None:
        """End an optimizer step."""

    # ---- a fit ------------------------------------------------------------------------------------------------------

    def begin(self, directory: Path | None, rank: int) -> None:
        """Begin a fit.

        Args:
            directory: the directory of the files unless ``dirpath`` was given; None to write none.
            rank: the number of this rank.
        """
        self._directory = directory if self.dirpath is None else self.dirpath
        self._rank = rank

    def end(self) -> None:
        """End a fit: write the summary into a file of this rank."""
        text = self.summary()
        if text and self._directory is not None:
            self.path(".txt").write_text(text + "\n", encoding="utf-8")

    def summary(self) -> str:
        """Return the measurements as text; empty for none."""
        return ""

    def path(self, suffix: str) -> Path:
        """Return the path of a file of this rank, in a directory that exists."""
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / f"{self.filename}-rank_{self._rank}{suffix}"


class PassThroughProfiler(Profiler):
    """A profiler that measures nothing, in place of ``None``."""

    measures = False
