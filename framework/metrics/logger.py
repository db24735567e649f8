"""``Logger``: the contract of destinations for metrics. Only rank 0 calls a logger's methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.arguments import NamesArguments
from .media_methods import MediaMethods

if TYPE_CHECKING:
    from torch import nn


class Logger(MediaMethods, NamesArguments, ABC):
    """Base class of loggers.

    All loggers of a run share its directory: ``attach`` passes it before anything is written, unless the user set
    ``save_dir``. The run's directory is below the ``save_dir`` of its first logger, if that was set. A logger opens and
    creates nothing before the first metric arrives.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str:
        """The version of this run within the experiment."""

    @property
    def save_dir(self) -> str | None:
        """The root directory of ``name/version``, or None if the logger writes no files."""
        return None

    @property
    def given_save_dir(self) -> str | None:
        """The root directory that the user gave to this logger, or None if it follows the run."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The directory that contains all versions of the experiment, or None if the logger writes no files."""
        return None

    @property
    def group_separator(self) -> str:
        """The text between a group and a name in the names of metrics."""
        return "/"

    @property
    def log_dir(self) -> str | None:
        """The directory of this run's files, or None if the logger writes no files."""
        return None

    @property
    def experiment(self) -> Any:
        """The underlying writer, for operations that this interface does not cover."""
        return None

    def expect(self, root: Path, name: str) -> None:
        """Set the root and the name of the runs to come. Called when a Trainer is created, before ``attach``."""

    def attach(self, root: Path, name: str, version: int) -> None:
        """Set the run's directory, ``root/name/version_<version>``."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at an optimizer step."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters."""

    @property
    def records_graph(self) -> bool:
        """Whether ``log_graph`` records anything."""
        return type(self).log_graph is not Logger.log_graph

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the model's graph, computed from ``input_array`` or the model's ``example_input_array``."""

    def save(self) -> None:
        """Flush buffered records."""

    def finalize(self, status: str) -> None:
        """Flush buffered records and close; ``status`` is ``"success"``, ``"failed"`` or ``"interrupted"``."""
        self.save()

    @property
    def close_seconds(self) -> float:
        """The longest time that the end of a run waits for ``finalize``."""
        return 5.0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after everything recorded so far, in JSON values, for a checkpoint."""
        return {}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Drop records made after a checkpoint, since the resumed run records them again.

        Called before the first metric of a run that resumes in the directory of the checkpoint.

        Args:
            step: the checkpoint's number of optimizer steps.
            state: the ``state_dict`` of that moment; empty if unknown.
        """

    def after_save_checkpoint(self, callback: Any) -> None:
        """Called after a checkpoint was written, with the callback that saved it, such as ``ModelCheckpoint``."""
