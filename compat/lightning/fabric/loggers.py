"""``lightning.fabric.loggers``: the loggers of phalanx, whose first argument is ``root_dir`` there."""

from __future__ import annotations

import os
from typing import Any

from ....loggers import __dir__ as __dir__, __getattr__ as __getattr__
from ....loggers.csv_file import CSVLogger as _CSVLogger
from ....loggers.tensorboard import TensorBoardLogger as _TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]  # noqa: F822


class CSVLogger(_CSVLogger):
    """``phalanx.loggers.CSVLogger`` with the argument names of Lightning's Fabric."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name or "", version, prefix, flush_logs_every_n_steps)


class TensorBoardLogger(_TensorBoardLogger):
    """``phalanx.loggers.TensorBoardLogger`` with the argument names of Lightning's Fabric."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root_dir, name or "", version, False, default_hp_metric, prefix, sub_dir, **kwargs)
