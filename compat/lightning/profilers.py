"""``lightning.pytorch.profilers``: the profilers of phalanx, and sentences about those that it lacks."""

from __future__ import annotations

from ...profilers import __all__ as __all__, __dir__ as __dir__, __getattr__ as __getattr__
