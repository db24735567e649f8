"""``lightning.fabric.wrappers``: functions about objects that ``Fabric.setup`` returned."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....framework.fabric.module import engine_of, unwrap

__all__ = ["is_wrapped"]


def is_wrapped(obj: object) -> bool:
    """Return whether an object is a module that ``Fabric.setup`` or ``setup_module`` returned."""
    return isinstance(obj, nn.Module) and engine_of(obj) is not None


def _unwrap_objects(collection: Any) -> Any:
    """Return the user's own module for a set-up one, and any other object as it is."""
    return unwrap(collection) if isinstance(collection, nn.Module) else collection
