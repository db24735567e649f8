"""``lightning.pytorch.core``: the base classes of modules and data modules."""

from __future__ import annotations

from ...framework.api.data_module import DataModule as LightningDataModule
from ...framework.api.train_module import TrainModule as LightningModule

__all__ = ["LightningDataModule", "LightningModule"]
