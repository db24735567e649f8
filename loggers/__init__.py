"""Loggers, one file each. The module of a logger is imported when its name is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.metrics.file_logger import FileLogger as FileLogger
    from ..framework.metrics.logger import Logger as Logger
    from .csv_file import CSVLogger as CSVLogger
    from .json_lines import JSONLinesLogger as JSONLinesLogger
    from .mlflow import MLFlowLogger as MLFlowLogger
    from .opentelemetry import OpenTelemetryLogger as OpenTelemetryLogger
    from .prometheus import PrometheusLogger as PrometheusLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger
    from .trackio import TrackioLogger as TrackioLogger
    from .wandb import WandbLogger as WandbLogger

_HOMES = {
    "..framework.metrics.file_logger": "FileLogger",
    "..framework.metrics.logger": "Logger",
    ".csv_file": "CSVLogger",
    ".json_lines": "JSONLinesLogger",
    ".mlflow": "MLFlowLogger",
    ".opentelemetry": "OpenTelemetryLogger",
    ".prometheus": "PrometheusLogger",
    ".tensorboard": "TensorBoardLogger",
    ".trackio": "TrackioLogger",
    ".wandb": "WandbLogger",
}

_WRITE_ONE = "derive one from phalanx.loggers.Logger, with name, version and log_metrics; see docs/extending.md."
# Loggers of other libraries that have no counterpart here.
_ABSENT = dict.fromkeys(("CometLogger", "LitLogger", "NeptuneLogger"), _WRITE_ONE)

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _ABSENT)
