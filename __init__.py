"""phalanx: train PyTorch models on one device or many, the same model every time.

The public API. Each name is imported on first use, so ``import phalanx`` is almost free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import errors as errors
    from . import registry as registry
    from .framework.api.callback import Callback as Callback
    from .framework.api.contracts import TrainerView as TrainerView
    from .framework.api.data_module import DataModule as DataModule
    from .framework.api.train_module import TrainModule as TrainModule
    from .framework.core.accumulation import AccumulationSchedule as AccumulationSchedule
    from .framework.core.errors import PhalanxError as PhalanxError
    from .framework.data.combined_loader import CombinedLoader as CombinedLoader
    from .framework.diagnostics.batch_dump import read_batch as read_batch
    from .framework.distributed.seed import seed_everything as seed_everything
    from .framework.fabric.fabric import Fabric as Fabric
    from .framework.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "AccumulationSchedule": ".framework.core.accumulation",
    "Callback": ".framework.api.callback",
    "CombinedLoader": ".framework.data.combined_loader",
    "DataModule": ".framework.api.data_module",
    "Fabric": ".framework.fabric.fabric",
    "PhalanxError": ".framework.core.errors",
    "TrainModule": ".framework.api.train_module",
    "Trainer": ".framework.trainer.trainer",
    "TrainerView": ".framework.api.contracts",
    "checkpoint": ".checkpoint",
    "errors": ".errors",
    "read_batch": ".framework.diagnostics.batch_dump",
    "registry": ".registry",
    "seed_everything": ".framework.distributed.seed",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES, modules=("checkpoint", "errors", "registry"))
