"""Where figures go: one file each. A logger's module loads when its name is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..framework.logger import Logger as Logger
    from .csv_file import CSVLogger as CSVLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger

_HOMES = {
    "CSVLogger": ".csv_file",
    "Logger": "..framework.logger",
    "TensorBoardLogger": ".tensorboard",
}

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
