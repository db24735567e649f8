"""Attributes that are replaced for a while."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any


def patch(patches: ExitStack, home: Any, name: str, value: Any) -> None:
    """Replace an attribute until ``patches`` is closed; an inherited attribute is inherited again after that."""
    before = getattr(home, name)
    undo = functools.partial(setattr, home, name, before) if name in vars(home) else None
    setattr(home, name, value)
    patches.callback(undo or functools.partial(delattr, home, name))
