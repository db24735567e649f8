"""``lightning.pytorch.loggers.csv_logs``."""

from __future__ import annotations

from ....loggers.csv_file import CSVLogger

__all__ = ["CSVLogger"]
