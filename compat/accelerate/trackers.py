"""Creation of loggers from the names that ``Accelerator(log_with=...)`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...framework.core.errors import ConfigurationError, unknown
from ...framework.core.registry import LOGGERS
from ...framework.fabric.fabric import Fabric
from ...framework.metrics.logger import Logger
from .configuration import ProjectConfiguration

# The argument that takes the project's name, for loggers whose ``name`` is that of the run.
_PROJECT_ARGUMENTS = {"mlflow": "experiment_name", "trackio": "project", "wandb": "project"}


class Trackers:
    """The loggers of an Accelerator.

    Args:
        fabric: writes to the loggers.
        given: a name, a ``Logger``, or several of them; ``"all"`` is TensorBoard and CSV.
        project: the directories of the run.
    """

    def __init__(self, fabric: Fabric, given: Any, project: ProjectConfiguration) -> None:
        self._fabric = fabric
        several = given if isinstance(given, list | tuple) else [] if given is None else [given]
        names = [each if isinstance(each, Logger) else str(getattr(each, "value", each)) for each in several]
        self._given = ["tensorboard", "csv"] if "all" in names else names
        self._project = project
        self._loggers: dict[str, Logger] = {}
        for name in self._given:
            if isinstance(name, str):
                LOGGERS.load(name)

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Create the loggers that ``log_with`` names, and record the configuration of the run.

        Args:
            project_name: name of the directory below the logging directory.
            config: hyperparameters.
            init_kwargs: for each name of a logger, further arguments.
        """
        self._fabric.loggers.extend(self.create(project_name, init_kwargs or {}))
        if self._fabric.is_global_zero and config is not None:
            for logger in self._fabric.loggers:
                logger.log_hyperparams(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a logger by name, or with ``unwrap`` its experiment object."""
        logger = self.find(name)
        return logger.experiment if unwrap else logger

    def create(self, project_name: str, init_kwargs: Mapping[str, Any]) -> list[Logger]:
        """Return the loggers, which write below the logging directory and the project's name."""
        for given in self._given:
            if isinstance(given, Logger):
                self._loggers[given.name] = given
                continue
            options = {"save_dir": self._project.logging_dir or "."}
            if argument := _PROJECT_ARGUMENTS.get(given):
                options[argument] = project_name
            else:
                options.update(name=project_name, version="")
            self._loggers[given] = LOGGERS.load(given)(**{**options, **init_kwargs.get(given, {})})
        return list(self._loggers.values())

    def find(self, name: str) -> Logger:
        """Return a logger by its name.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if not self._loggers:
            raise ConfigurationError("get_tracker: there are no trackers yet; pass log_with, and call init_trackers.")
        if name not in self._loggers:
            raise unknown("tracker", name, self._loggers)
        return self._loggers[name]
