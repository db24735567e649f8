"""``accelerate.utils``: what programs import from there."""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Any

from ...framework.core.foreign_names import ACCELERATE_INTERNAL, ACCELERATE_UTILS
from .availability import availability, is_availability
from .configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from .dynamo import DynamoBackend, TorchDynamoPlugin
from .functions import set_seed
from .memory import find_executable_batch_size, release_memory
from .operations import (
    broadcast,
    broadcast_object_list,
    compare_versions,
    concatenate,
    convert_to_fp32,
    extract_model_from_parallel,
    find_batch_size,
    gather,
    gather_object,
    is_compiled_module,
    is_namedtuple,
    is_torch_tensor,
    is_torch_version,
    listify,
    pad_across_processes,
    patch_environment,
    reduce,
    save,
    send_to_device,
    str_to_bool,
    tqdm,
    wait_for_everyone,
)
from .plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "compare_versions",
    "concatenate",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "is_compiled_module",
    "is_namedtuple",
    "is_torch_tensor",
    "is_torch_version",
    "listify",
    "pad_across_processes",
    "patch_environment",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "str_to_bool",
    "tqdm",
    "wait_for_everyone",
]


# Imported when asked for: they are Accelerate's own.
_LARGE_MODELS = {
    "compute_module_sizes",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "offload_state_dict",
}


class LoggerType(str, Enum):
    """The trackers that ``log_with`` names; other ones are given as ``Logger`` objects."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class PrecisionType(str, Enum):
    """The names of ``mixed_precision``."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


def __getattr__(name: str) -> Any:
    if is_availability(name):
        return availability(name)
    if name in _LARGE_MODELS:
        return getattr(import_module(".large_models", __package__), name)
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(f"{__name__} has no {name}: {ACCELERATE_UTILS.get(name, ACCELERATE_INTERNAL)}", name=name)
