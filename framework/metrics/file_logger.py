"""``FileLogger``: base class of the loggers that write into the run's directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ConfigurationError, StorageError
from ..storage.cached_url import local_place
from .hparams_text import as_mapping, as_yaml
from .logger import Logger

_DEFAULT_NAME = "phalanx_logs"
# A file in a log directory outside the run's directory; it contains the path of the run that owns it.
_OWNER_FILE = ".run"


class FileLogger(Logger):
    """Base class of the loggers that write files under ``save_dir/name/version_<n>``.

    Each of the three parts can be given by the user and otherwise follows the run (``attach``). Before a run they are
    those of the Trainer, or without one the working directory and ``phalanx_logs``, and the next free version. A
    directory with files of another run is never written to: the next free version is used instead. ``version`` and an
    empty ``name`` apply only to the logger's files, not to the directory of checkpoints.
    """

    LOGGER_JOIN_CHAR = "-"
    """The text between the prefix and the key of a metric."""
    NAME_HPARAMS_FILE = "hparams.yaml"
    """The file of the hyperparameters."""
    _LIVE: ClassVar[Mapping[str, Callable[[], Any]]] = {}
    """The attributes that belong to one object only, and functions that create those of a copy."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        if isinstance(version, bool) or not isinstance(version, int | str | None):
            raise ConfigurationError(f"version={version!r}: give a number, a directory's name, or None.")
        if not isinstance(prefix, str):
            raise ConfigurationError(f"prefix={prefix!r}: give a string.")
        self._fixed_save_dir = None if save_dir is None else str(local_place(os.path.expandvars(save_dir)))
        self._fixed_name = name
        self._fixed_version = version
        self._prefix = prefix
        self._run: tuple[Path, str, int] | None = None
        self._expected = (os.curdir, _DEFAULT_NAME)
        self._version: int | str | None = version
        self._hparams: dict[str, Any] = {}
        self._next_step = 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy opens files and threads of its own.
        return {name: value for name, value in vars(self).items() if name not in self._LIVE}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in {**state, **{name: create() for name, create in self._LIVE.items()}}.items():
            setattr(self, name, value)

    def expect(self, root: Path, name: str) -> None:
        self._expected = (str(root), name)

    def attach(self, root: Path, name: str, version: int) -> None:
        if self._run == (root, name, version):
            return
        # Metrics logged before the first run, into a directory that the user chose, belong to that run.
        keeps_version = self._run is None and self._fixed_save_dir is not None
        if not keeps_version:
            self.finalize("success")
            self._version = self._fixed_version
        self._run = (root, name, version)

    @property
    def name(self) -> str:
        if self._fixed_name is not None:
            return self._fixed_name
        return self._run[1] if self._run else self._expected[1]

    @property
    def save_dir(self) -> str:
        if self._fixed_save_dir is not None:
            return self._fixed_save_dir
        return str(self._run[0]) if self._run else self._expected[0]

    @property
    def given_save_dir(self) -> str | None:
        return self._fixed_save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self.save_dir, self.name)

    @property
    def version(self) -> int | str:
        if self._version is None:
            self._version = self._choose_version()
        return self._version

    @property
    def log_dir(self) -> str:
        version = self.version
        return os.path.join(self.root_dir, version if isinstance(version, str) else f"version_{version}")

    def _choose_version(self) -> int:
        if self._run and self._fixed_save_dir is None and self._fixed_name is None:
            return self._run[2]
        if self._run and os.path.abspath(os.path.join(self.root_dir, f"version_{self._run[2]}")) == self._run_path():
            return self._run[2]
        taken = _versions(Path(self.root_dir))
        for version, directory in taken.items():
            if self._run and _owner(directory) == self._run_path():
                return version
        if self._run and self._run[2] not in taken:
            return self._run[2]
        return max(taken, default=-1) + 1

    def _run_path(self) -> str:
        assert self._run is not None
        root, name, version = self._run
        return os.path.abspath(root / name / f"version_{version}")

    def _make_log_dir(self) -> Path:
        """Create the directory with the file of hyperparameters, record the run that owns it, and return it.

        Raises:
            StorageError: the directory cannot be created.
        """
        directory = Path(self.log_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self._run and self._fixed_version is None and os.path.abspath(directory) != self._run_path():
                (directory / _OWNER_FILE).write_text(self._run_path(), encoding="utf-8")
            if not (directory / self.NAME_HPARAMS_FILE).exists():
                (directory / self.NAME_HPARAMS_FILE).write_text(as_yaml(self._hparams), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"The log directory {str(directory)!r} cannot be created: {error}.") from error
        return directory

    def _write_hparams(self, params: Any) -> dict[str, Any]:
        """Add hyperparameters to their file; return them as a mapping."""
        added = as_mapping(params)
        self._hparams.update(added)
        (self._make_log_dir() / self.NAME_HPARAMS_FILE).write_text(as_yaml(self._hparams), encoding="utf-8")
        return added

    def _count_step(self, step: int | None) -> int:
        """Return the step of a record, by default the one after the last."""
        step = self._next_step if step is None else step
        self._next_step = step + 1
        return step

    def _has_own_files(self, state: Mapping[str, Any]) -> bool:
        """Whether the files here are those of a state."""
        # A directory that the user chose may contain another run's files by now.
        return self._fixed_save_dir is None or state.get("directory") == self.log_dir

    def _with_prefix(self, key: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{key}" if self._prefix else key


def _versions(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    found = ((re.fullmatch(r"version_(\d+)", entry.name), entry) for entry in sorted(root.iterdir()))
    return {int(match[1]): entry for match, entry in found if match and entry.is_dir()}


def _owner(directory: Path) -> str | None:
    try:
        return (directory / _OWNER_FILE).read_text(encoding="utf-8")
    except OSError:
        return None


def plain_number(value: Any) -> Any:
    """Return the Python number in a 0-d tensor or array; other values as they are."""
    return value.item() if hasattr(value, "item") else value
