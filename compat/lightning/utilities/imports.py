"""``lightning.pytorch.utilities.imports``: whether optional packages are installed."""

from __future__ import annotations

from lightning_utilities.core.imports import RequirementCache

__all__: list[str] = []

_OMEGACONF_AVAILABLE = RequirementCache("omegaconf")
_RICH_AVAILABLE = RequirementCache("rich")
_TORCHVISION_AVAILABLE = RequirementCache("torchvision")
