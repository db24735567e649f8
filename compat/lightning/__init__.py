"""Lightning's names for the objects of phalanx: ``import phalanx.compat.lightning as pl``.

Replace ``lightning.pytorch``, ``pytorch_lightning`` or ``lightning`` in the import lines of a program by
``phalanx.compat.lightning``. The objects are phalanx's own: an alias adds no behavior, and
docs/migrating-from-lightning.md lists the differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.lazy_exports import face
from .aliases import ABSENT, install

if TYPE_CHECKING:
    from ... import __version__ as __version__
    from ...framework.api.callback import Callback as Callback
    from ...framework.api.data_module import DataModule
    from ...framework.api.train_module import TrainModule
    from ...framework.distributed.seed import seed_everything as seed_everything
    from ...framework.fabric.fabric import Fabric as Fabric
    from ...framework.trainer.trainer import Trainer as Trainer
    from . import (
        callbacks as callbacks,
        cli as cli,
        fabric as fabric,
        loggers as loggers,
        profilers as profilers,
        strategies as strategies,
        utilities as utilities,
    )
    from .utilities import cli_lightning_logo as cli_lightning_logo

    LightningDataModule = DataModule
    LightningModule = TrainModule

_HOMES = {
    ".": "callbacks cli core fabric loggers profilers strategies trainer utilities",
    ".utilities": "cli_lightning_logo",
    "...": "__version__",
    "...framework.api.callback": "Callback",
    "...framework.api.data_module": "LightningDataModule=DataModule",
    "...framework.api.train_module": "LightningModule=TrainModule",
    "...framework.distributed.seed": "seed_everything",
    "...framework.fabric.fabric": "Fabric",
    "...framework.trainer.trainer": "Trainer",
}

install()
__all__, __getattr__, __dir__ = face(__name__, _HOMES, ABSENT)
