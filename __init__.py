"""phalanx: train PyTorch models on one device or many, the same model every time.

The public face. Each name is fetched when it is first asked for, so that ``import phalanx`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .framework import checkpoint as checkpoint
    from .framework.accumulation import AccumulationSchedule as AccumulationSchedule
    from .framework.callback import Callback as Callback
    from .framework.combined import CombinedLoader as CombinedLoader
    from .framework.datamodule import DataModule as DataModule
    from .framework.errors import PhalanxError as PhalanxError
    from .framework.fabric import Fabric as Fabric
    from .framework.module import TrainModule as TrainModule
    from .framework.seed import seed_everything as seed_everything
    from .framework.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "AccumulationSchedule": ".framework.accumulation",
    "Callback": ".framework.callback",
    "CombinedLoader": ".framework.combined",
    "DataModule": ".framework.datamodule",
    "Fabric": ".framework.fabric",
    "PhalanxError": ".framework.errors",
    "TrainModule": ".framework.module",
    "Trainer": ".framework.trainer",
    "seed_everything": ".framework.seed",
}
_MODULES = {"checkpoint": ".framework.checkpoint"}

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = import_module(_MODULES[name], __name__)
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name], __name__), name)
    else:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
