"""``Logger``: where figures go. Rank 0 alone calls a logger's methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class Logger(ABC):
    """Base class of loggers.

    The directory of a run is one for all its loggers: ``attach`` tells it before anything is written, unless the user
    fixed ``save_dir``. Nothing is opened or created before the first figure arrives.
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
        """The root under which ``name/version`` lies, or None where the logger keeps no files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The directory of this run's files, or None where the logger keeps none."""
        return None

    @property
    def experiment(self) -> Any:
        """The underlying writer, for what this interface does not cover."""
        return None

    def attach(self, root: Path, name: str, version: int) -> None:
        """Learn the run's directory, ``root/name/version_<version>``."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record figures at an optimizer step."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters."""

    def log_graph(self, model: nn.Module) -> None:
        """Record the model's graph."""

    def save(self) -> None:
        """Write what is buffered."""

    def finalize(self, status: str) -> None:
        """Write what is buffered and close; ``status`` is ``"success"``, ``"failed"`` or ``"interrupted"``."""
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return where the figures stand, in JSON values, for a checkpoint: after all that came so far."""
        return {}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Called before the first figure of a run that goes on from a checkpoint in the directory it was saved from.

        What was recorded after the checkpoint is dropped, for it is about to come again. ``step`` is the checkpoint's
        number of optimizer steps, ``state`` what ``state_dict`` returned then, empty where that is not known.
        """

    def after_save_checkpoint(self, callback: Any) -> None:
        """Called after a checkpoint was written, with the callback that saved it, such as ``ModelCheckpoint``."""
