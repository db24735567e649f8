"""``lightning.fabric``: Fabric, the function that seeds all generators, and functions about modules that are set up."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....framework.distributed.seed import seed_everything
from ....framework.fabric.fabric import Fabric
from ....framework.fabric.module import engine_of, unwrap
from ..aliases import submodules_of
from . import loggers

__all__ = ["Fabric", "is_wrapped", "loggers", "seed_everything", "strategies", "utilities", "wrappers"]

__getattr__ = submodules_of(__name__)


def is_wrapped(obj: object) -> bool:
    """Return whether an object is a module that ``Fabric.setup`` or ``setup_module`` returned."""
    return isinstance(obj, nn.Module) and engine_of(obj) is not None


def _unwrap_objects(collection: Any) -> Any:
    """Return the user's own module for a set-up one, and any other object as it is."""
    return unwrap(collection) if isinstance(collection, nn.Module) else collection
