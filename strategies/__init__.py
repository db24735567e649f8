"""How work and state are spread over ranks: one file for each strategy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..framework.strategy import Strategy as Strategy
    from .ddp import DDPStrategy as DDPStrategy
    from .deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from .fsdp import FSDPStrategy as FSDPStrategy
    from .fsdp import hsdp as hsdp
    from .single import SingleDeviceStrategy as SingleDeviceStrategy

_HOMES = {
    "DDPStrategy": ".ddp",
    "DeepSpeedStrategy": ".deepspeed",
    "FSDPStrategy": ".fsdp",
    "SingleDeviceStrategy": ".single",
    "Strategy": "..framework.strategy",
    "hsdp": ".fsdp",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
