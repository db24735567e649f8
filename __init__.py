"""phalanx: train PyTorch models on one device or many, with the same optimizer steps under every strategy.

The public API. Each name is imported on first use, so ``import phalanx`` is almost free.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face
from .framework.core.package_paths import warn_if_clone_hides_package
from .framework.launch import exception_hook

if TYPE_CHECKING:
    from . import (
        callbacks as callbacks,
        checkpoint as checkpoint,
        compat as compat,
        configuration as configuration,
        errors as errors,
        hf as hf,
        loggers as loggers,
        precisions as precisions,
        profilers as profilers,
        registry as registry,
        strategies as strategies,
    )
    from .framework.api.callback import Callback as Callback
    from .framework.api.contracts import TrainerView as TrainerView
    from .framework.api.data_module import DataModule as DataModule
    from .framework.api.train_module import TrainModule as TrainModule
    from .framework.configuration.trainer_cli import TrainerCLI as TrainerCLI
    from .framework.core.accumulation import AccumulationSchedule as AccumulationSchedule
    from .framework.core.errors import PhalanxError as PhalanxError
    from .framework.core.split_optimizer import Split as Split
    from .framework.data.batch_by_tokens import BatchByTokens as BatchByTokens
    from .framework.data.combined_loader import CombinedLoader as CombinedLoader
    from .framework.data.mix import Mix as Mix
    from .framework.data.packed import Packed as Packed
    from .framework.diagnostics.batch_dump import read_batch as read_batch
    from .framework.distributed.seed import seed_everything as seed_everything
    from .framework.fabric.fabric import Fabric as Fabric
    from .framework.parallel.sequence_part import SequencePart as SequencePart
    from .framework.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    ".": "callbacks checkpoint compat configuration errors hf loggers precisions profilers registry strategies",
    ".framework.api.callback": "Callback",
    ".framework.api.contracts": "TrainerView",
    ".framework.api.data_module": "DataModule",
    ".framework.api.train_module": "TrainModule",
    ".framework.core.accumulation": "AccumulationSchedule",
    ".framework.configuration.trainer_cli": "TrainerCLI",
    ".framework.core.errors": "PhalanxError",
    ".framework.data.batch_by_tokens": "BatchByTokens",
    ".framework.core.split_optimizer": "Split",
    ".framework.data.combined_loader": "CombinedLoader",
    ".framework.data.mix": "Mix",
    ".framework.data.packed": "Packed",
    ".framework.diagnostics.batch_dump": "read_batch",
    ".framework.distributed.seed": "seed_everything",
    ".framework.fabric.fabric": "Fabric",
    ".framework.parallel.sequence_part": "SequencePart",
    ".framework.trainer.trainer": "Trainer",
}

# Names of Lightning and Accelerate that are another name here.
_ABSENT = {
    "Accelerator": "Fabric is its counterpart; phalanx.compat.accelerate has it under this name.",
    "LightningCLI": "it is called TrainerCLI; phalanx.compat.lightning.cli has it under this name.",
    "LightningDataModule": "it is called DataModule; phalanx.compat.lightning has it under this name.",
    "LightningModule": "it is called TrainModule; phalanx.compat.lightning has it under this name.",
    "rank_zero_only": "import it from phalanx.compat.lightning.utilities.",
    "utilities": "functions of Lightning's utilities are in phalanx.compat.lightning.utilities.",
}

warn_if_clone_hides_package()

# An error may be raised before there is a Trainer, and a script with a handler of its own keeps it. What the
# hook needs is imported when it is called. An interpreter has no script whose exit code could matter.
if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
    sys.excepthook = exception_hook

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _ABSENT)
