"""``lightning.fabric.strategies``: the strategies of phalanx, and sentences about those that it lacks."""

from __future__ import annotations

from ....strategies import __all__ as __all__, __dir__ as __dir__, __getattr__ as __getattr__
