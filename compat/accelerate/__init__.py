"""Accelerate's names over Fabric: ``from phalanx.compat.accelerate import Accelerator``.

Replace ``accelerate`` in the import lines of a program by ``phalanx.compat.accelerate``.
docs/migrating-from-accelerate.md lists the differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.foreign_names import ACCELERATE
from ...framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ... import __version__ as __version__
    from . import local_sgd as local_sgd, logging as logging, utils as utils
    from .accelerator import Accelerator as Accelerator
    from .configuration import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        GradScalerKwargs as GradScalerKwargs,
        ProfileKwargs as ProfileKwargs,
    )
    from .functions import (
        find_executable_batch_size as find_executable_batch_size,
        notebook_launcher as notebook_launcher,
        skip_first_batches as skip_first_batches,
    )
    from .large_models import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        infer_auto_device_map as infer_auto_device_map,
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from .plugins import (
        DeepSpeedPlugin as DeepSpeedPlugin,
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from .state import PartialState as PartialState

_HOMES = {
    ".": "local_sgd logging utils",
    "...": "__version__",
    ".accelerator": "Accelerator",
    ".configuration": "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
    "DistributedType GradScalerKwargs ProfileKwargs",
    ".functions": "find_executable_batch_size notebook_launcher skip_first_batches",
    ".large_models": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map "
    "init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model",
    ".plugins": "DeepSpeedPlugin FullyShardedDataParallelPlugin",
    ".state": "PartialState",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES, ACCELERATE)
