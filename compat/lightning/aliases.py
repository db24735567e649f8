"""Modules of Lightning that have no file here: a table of their names, and the finder that imports them by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...framework.core.lazy_exports import face

_PACKAGE = __name__.rpartition(".")[0]
_PHALANX = _PACKAGE.partition(".compat")[0]
_UTILITIES = "compat.lightning.utilities"
_RANK_ZERO = "rank_prefixed_message rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn"

# For each module of Lightning the modules of phalanx that define its names. "*" stands for all names of a module, "."
# for the modules below.
MODULES: dict[str, dict[str, str]] = {
    "callbacks.callback": {"framework.api.callback": "Callback"},
    "callbacks.early_stopping": {"callbacks.early_stopping": "EarlyStopping"},
    "callbacks.finetuning": {"callbacks.finetuning": "BackboneFinetuning BaseFinetuning"},
    "callbacks.lr_monitor": {"callbacks.learning_rate": "LearningRateMonitor"},
    "callbacks.model_checkpoint": {"callbacks.model_checkpoint": "ModelCheckpoint"},
    "callbacks.prediction_writer": {"callbacks.prediction_writer": "BasePredictionWriter"},
    "callbacks.progress": {"callbacks.progress": "ProgressBar RichProgressBar TQDMProgressBar"},
    "callbacks.timer": {"callbacks.timer": "Timer"},
    "core": {
        "framework.api.data_module": "LightningDataModule=DataModule",
        "framework.api.train_module": "LightningModule=TrainModule",
    },
    "core.mixins": {"framework.core.hyperparameters": "HyperparametersMixin"},
    "core.optimizer": {"framework.loop.manual_optimizer": "LightningOptimizer=ManualOptimizer"},
    "fabric.strategies": {"strategies": "*"},
    "fabric.utilities": {
        ".": "apply_func rank_zero seed types",
        _UTILITIES: "AttributeDict measure_flops move_data_to_device rank_zero_deprecation rank_zero_info "
        "rank_zero_only rank_zero_warn",
    },
    "fabric.utilities.apply_func": {_UTILITIES: "move_data_to_device"},
    "fabric.utilities.rank_zero": {_UTILITIES: _RANK_ZERO},
    "fabric.utilities.seed": {"framework.distributed.seed": "seed_everything"},
    "fabric.utilities.types": {
        _UTILITIES: "Optimizable ReduceOp",
        f"{_UTILITIES}.types": "_DEVICE _MAP_LOCATION_TYPE _PATH",
    },
    "fabric.wrappers": {"compat.lightning.fabric": "_unwrap_objects is_wrapped"},
    "loggers.csv_logs": {"loggers.csv_file": "CSVLogger"},
    "loggers.logger": {"framework.metrics.logger": "Logger"},
    "loggers.tensorboard": {"loggers.tensorboard": "TensorBoardLogger"},
    "trainer": {
        ".": "states",
        "framework.distributed.seed": "seed_everything",
        "framework.trainer.trainer": "Trainer",
    },
    "trainer.states": {"compat.lightning.states": "RunningStage TrainerFn TrainerState TrainerStatus"},
    "utilities.combined_loader": {_UTILITIES: "CombinedLoader"},
    "utilities.exceptions": {"framework.core.errors": "MisconfigurationException=ConfigurationError"},
    "utilities.grads": {_UTILITIES: "grad_norm"},
    "utilities.imports": {_UTILITIES: "_OMEGACONF_AVAILABLE _RICH_AVAILABLE _TORCHVISION_AVAILABLE"},
    "utilities.memory": {
        "framework.diagnostics.out_of_memory": "is_oom_error=is_out_of_memory",
        "framework.distributed.devices": "garbage_collection_cuda=empty_caches",
    },
    "utilities.model_helpers": {_UTILITIES: "get_torchvision_model is_overridden"},
    "utilities.parsing": {_UTILITIES: "AttributeDict get_init_args"},
    "utilities.rank_zero": {_UTILITIES: _RANK_ZERO},
    "utilities.seed": {_UTILITIES: "isolate_rng"},
    "utilities.warnings": {_UTILITIES: "PossibleUserWarning"},
}

# Modules without a counterpart, wherever Lightning has them, and what to use instead.
ABSENT = {
    "accelerators": 'name the device with accelerator="cpu" or "cuda" of Trainer and Fabric.',
    "demos": "keep 'from lightning.pytorch.demos import ...' for its data sets and plain modules, or copy them into "
    "the program; its LightningModules and LightningDataModules need their base class changed.",
    "loops": "there are no loop objects: read trainer.progress, or write your own loop with phalanx.Fabric.",
    "plugins": "name the precision with precision=...; ranks under SLURM, MPI and torchrun are found without "
    "a plug-in, and SyncBatchNorm is set with Trainer(sync_batchnorm=True).",
    "pytorch": "remove '.pytorch': phalanx.compat.lightning stands in for lightning and for lightning.pytorch.",
    "tuner": "compare short fits, Trainer(max_steps=...), with several batch sizes or learning rates.",
}


class _Aliases(MetaPathFinder, Loader):
    """Imports the modules of ``MODULES``, and refuses those of ``ABSENT``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        name = fullname.removeprefix(f"{_PACKAGE}.")
        outer, _, last = fullname.rpartition(".")
        if last in ABSENT:
            raise ImportError(f"{outer} has no {last}: {ABSENT[last]}", name=fullname)
        has_modules = any(each.startswith(f"{name}.") for each in MODULES)
        return ModuleSpec(fullname, self, is_package=has_modules) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        alias = module.__name__.removeprefix(f"{_PACKAGE}.")
        module.__doc__ = f"Lightning's names in ``{alias}``."
        homes = {home if home == "." else f"{_PHALANX}.{home}": names for home, names in MODULES[alias].items()}
        exports: Any = face(module.__name__, homes)
        for home, names in homes.items():
            if names == "*":
                whole = import_module(home)
                exports = whole.__all__, whole.__getattr__, whole.__dir__
        for name, value in zip(("__all__", "__getattr__", "__dir__"), exports, strict=True):
            setattr(module, name, value)


def install() -> None:
    """Have ``import`` find the modules of the table."""
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.append(_Aliases())


def submodules_of(package: str) -> Callable[[str], ModuleType]:
    """Return a ``__getattr__`` that imports a package's module of the table when it is first read."""

    def __getattr__(name: str) -> ModuleType:
        if f"{package}.{name}".removeprefix(f"{_PACKAGE}.") not in MODULES:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return __getattr__
