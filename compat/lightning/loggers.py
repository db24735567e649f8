"""``lightning.pytorch.loggers``: the loggers of phalanx, and sentences about those that it lacks."""

from __future__ import annotations

from ...loggers import __all__ as __all__, __dir__ as __dir__, __getattr__ as __getattr__

# A package without files: its modules are in the table of aliases.
__path__: list[str] = []
