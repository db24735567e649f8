"""Accelerate's names over Fabric: ``from phalanx.compat.accelerate import Accelerator``.

Replace ``accelerate`` in the import lines of a program by ``phalanx.compat.accelerate``.
docs/migrating-from-accelerate.md lists the differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ... import __version__ as __version__
    from . import local_sgd as local_sgd, logging as logging, utils as utils
    from .accelerator import Accelerator as Accelerator
    from .configuration import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DeepSpeedPlugin as DeepSpeedPlugin,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        GradScalerKwargs as GradScalerKwargs,
        ProfileKwargs as ProfileKwargs,
    )
    from .functions import notebook_launcher as notebook_launcher, skip_first_batches as skip_first_batches
    from .memory import find_executable_batch_size as find_executable_batch_size
    from .state import PartialState as PartialState

_HOMES = {
    ".": "local_sgd logging utils",
    "...": "__version__",
    ".accelerator": "Accelerator",
    ".configuration": "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
    "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs ProfileKwargs",
    ".functions": "notebook_launcher skip_first_batches",
    ".memory": "find_executable_batch_size",
    ".state": "PartialState",
}

_LARGE = "large models are built and loaded under strategy='fsdp' or 'zero3', with Fabric.init_module."
_ABSENT = {
    "InitProcessGroupKwargs": "phalanx creates the process group; Trainer(stall_timeout=...) limits waiting.",
    "ParallelismConfig": "name a strategy: Accelerator(strategy='fsdp'), or an object of phalanx.strategies.",
    "cpu_offload": _LARGE,
    "cpu_offload_with_hook": _LARGE,
    "debug_launcher": "use notebook_launcher(function, args, num_processes=2).",
    "disk_offload": _LARGE,
    "dispatch_model": _LARGE,
    "infer_auto_device_map": _LARGE,
    "init_empty_weights": "use Fabric.init_module(empty_init=True), or torch.device('meta').",
    "init_on_device": "use 'with torch.device(...)'.",
    "load_checkpoint_and_dispatch": _LARGE,
    "load_checkpoint_in_model": "use Fabric.load_raw.",
    "prepare_pippy": "pipeline parallelism is not part of phalanx.",
    "synchronize_rng_states": "loaders draw the same permutation on all ranks without it.",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _ABSENT)
