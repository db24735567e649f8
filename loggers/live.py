"""``LiveLogger``: base class of the loggers that show the newest values while a run trains, and keep none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ..framework.core.errors import ConfigurationError
from ..framework.metrics.file_logger import plain_number
from ..framework.metrics.logger import Logger
from ..framework.metrics.media import Media
from ..framework.report.document import run_name


class LiveLogger(Logger):
    """Base class of the loggers that write no files: what they are given is known to others once they ask for it.

    Attributes:
        LIBRARY: the module of the library.
        REQUIREMENT: the package to install, with its range of versions.
    """

    LIBRARY = ""
    REQUIREMENT = ""
    _LIVE: ClassVar[tuple[str, ...]] = ()
    """The attributes that belong to one object only; those of a copy are None."""

    def __init__(self, prefix: str) -> None:
        cls = type(self).__name__
        if not _is_installed(self.LIBRARY):
            raise ConfigurationError(f"{cls} needs {self.LIBRARY}: pip install '{self.REQUIREMENT}'.")
        if not isinstance(prefix, str):
            raise ConfigurationError(f"{cls}(prefix={prefix!r}): give a string.")
        self._prefix = prefix
        self._run: tuple[Path, str, int] | None = None
        self._next_step = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(self._LIVE)}

    @property
    def name(self) -> str:
        return self._run[1] if self._run else ""

    @property
    def version(self) -> int | str:
        return self._run[2] if self._run else 0

    @property
    def directory(self) -> Path | None:
        """The directory of the run, in which other loggers may write; None before the first run."""
        return self._run[0] / self._run[1] / f"version_{self._run[2]}" if self._run else None

    @property
    def run(self) -> str:
        """The last parts of the path of the run's directory, by which its values are labelled."""
        return run_name(self.directory) if self.directory else "run"

    def attach(self, root: Path, name: str, version: int) -> None:
        self._run = (root, name, version)

    def log_media(self, media: Media) -> None:
        """Leave out a media item, and say so once for each kind."""
        if media.kind not in self._stored_kinds:
            self._stored_kinds |= {media.kind}
            self._say(f"{type(self).__name__} leaves out {media.kind}: give another logger beside it.")

    def _values(self, metrics: Mapping[str, Any], step: int | None) -> tuple[dict[str, float], int]:
        """Return metrics as numbers under their full names, and the step, by default the one after the last."""
        step = self._next_step if step is None else step
        self._next_step = step + 1
        before = f"{self._prefix}-" if self._prefix else ""
        return {f"{before}{name}": float(plain_number(value)) for name, value in metrics.items()}, step


def _is_installed(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return False
    # A directory of this name in the working directory has a spec as well, without a file.
    return spec is not None and spec.origin is not None
