"""``lightning.pytorch.utilities.exceptions``."""

from __future__ import annotations

from ....framework.core.errors import ConfigurationError as MisconfigurationException

__all__ = ["MisconfigurationException"]
