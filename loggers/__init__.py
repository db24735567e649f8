"""Loggers, one file each. The module of a logger is imported when its name is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.metrics.file_logger import FileLogger as FileLogger
    from ..framework.metrics.logger import Logger as Logger
    from .csv_file import CSVLogger as CSVLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger

_HOMES = {
    "CSVLogger": ".csv_file",
    "FileLogger": "..framework.metrics.file_logger",
    "Logger": "..framework.metrics.logger",
    "TensorBoardLogger": ".tensorboard",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
